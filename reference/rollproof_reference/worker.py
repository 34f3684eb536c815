"""What runs inside the engine's worker: replacing an adapter's weights from memory, whole or not at all,
and counting what updates and generation cost.

vLLM mixes ``AdapterWorker`` into its worker (``worker_extension_cls``) and calls its methods by name
over ``collective_rpc``, with plain values. vLLM has no public call for this, so the methods reach
into its LoRA manager; ``rollproof_describe`` tests first that everything they need is there, and the
rollout falls back to the disk when it isn't.
"""

from __future__ import annotations

import os
from typing import Any

import torch


class AdapterWorker:
    """Methods added to vLLM's worker. They run between two steps of the engine."""

    model_runner: Any
    rollproof_counted: dict[str, int] | None = None

    def rollproof_describe(self) -> dict[str, Any]:
        """Which module names take an adapter, and what this vLLM lacks for updates from memory and for
        counting. Counting begins here."""
        manager = getattr(getattr(self.model_runner, "lora_manager", None), "_adapter_manager", None)
        lacking = [
            f"LoRAModelManager.{name}"
            for name in (
                "get_adapter",
                "add_adapter",
                "remove_adapter",
                "activate_adapter",
                "model",
            )
            if not hasattr(manager, name)
        ]
        try:
            from vllm.lora.lora_model import LoRAModel
            from vllm.lora.peft_helper import PEFTHelper

            lacking += [] if hasattr(LoRAModel, "from_lora_tensors") else ["from_lora_tensors"]
            lacking += [] if hasattr(PEFTHelper, "from_dict") else ["PEFTHelper.from_dict"]
        except ImportError as error:
            lacking.append(str(error))
        packed = getattr(manager, "packed_modules", {})
        wrapped = [part for name in getattr(manager, "modules", {}) for part in packed.get(name, [name])]
        served = {name.rpartition(".")[2] for name in wrapped}
        try:
            self.rollproof_counters()
            uncounted = ""
        except AttributeError as error:
            uncounted = str(error)
        return {"served": sorted(served), "lacking": lacking, "uncounted": uncounted}

    def rollproof_counters(self) -> dict[str, int]:
        """How often this worker took an adapter's weights, their bytes, and the model's forward passes."""
        if self.rollproof_counted is None:
            self.rollproof_counted = _count(self.model_runner)
        return self.rollproof_counted

    def rollproof_processes(self) -> list[int]:
        """This process and the one that started it: the engine's own, or the rollout's."""
        return [os.getpid(), os.getppid()]

    def rollproof_swap(self, int_id: int, config: dict[str, Any], blob: bytes) -> None:
        """Serve the tensors of a safetensors ``blob`` under ``int_id`` from the next step on.

        The new adapter is built before the old one goes; if activating it fails, the old one is
        put back and the error raised.
        """
        from safetensors.torch import load
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        if (counted := self.rollproof_counted) is not None:
            counted["adapter_reads"] += 1
            counted["adapter_bytes"] += len(blob)
        worker_manager = self.model_runner.lora_manager
        manager = worker_manager._adapter_manager
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(worker_manager.lora_config)
        new = LoRAModel.from_lora_tensors(
            lora_model_id=int_id,
            tensors=load(blob),
            peft_helper=helper,
            device="cpu",
            dtype=worker_manager.lora_config.lora_dtype,
            model_vocab_size=getattr(worker_manager, "vocab_size", None),
            weights_mapper=_renames(manager.model),
        )
        old = manager.get_adapter(int_id)
        manager.remove_adapter(int_id)
        try:
            _activate(manager, new)
        except Exception:
            manager.remove_adapter(int_id)
            if old is not None:
                _activate(manager, old)
            raise

    def rollproof_reload(self) -> None:
        """Read the base weights from the model's folder again, after a sleep that dropped them."""
        runner = self.model_runner
        wrapped = _without_reload(runner.get_model())
        try:
            for parent, leaf, layer in wrapped:
                setattr(parent, leaf, layer.base_layer)
            runner.reload_weights()
        finally:
            for parent, leaf, layer in wrapped:
                setattr(parent, leaf, layer)
        # What the kernels read of the last batch was dropped too; vLLM rewrites it for another mapping only.
        runner.lora_manager._adapter_manager._last_mapping = None


def _without_reload(model: Any) -> list[tuple[Any, str, Any]]:
    """The layers that LoRA wraps, as (parent, name, wrapper), where a wrapper can't load weights itself.

    vLLM before 0.28 looks their weights up by the names they have without the wrapper (vllm#39934).
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return []
    modules = dict(model.named_modules())
    places = ((*name.rpartition(".")[::2], layer) for name, layer in modules.items())
    return [(modules[up], leaf, layer) for up, leaf, layer in places if isinstance(layer, BaseLayerWithLoRA)]


def _count(runner: Any) -> dict[str, int]:
    """Count the adapters that vLLM loads from folders, and the steps that compute a token."""
    counted = {"adapter_reads": 0, "adapter_bytes": 0, "engine_steps": 0}
    manager = runner.lora_manager
    load, execute = manager._load_adapter, runner.execute_model

    def counting_load(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        counted["adapter_reads"] += 1
        counted["adapter_bytes"] += sum(
            half.numel() * half.element_size()
            for layer in loaded.loras.values()
            for half in (layer.lora_a, layer.lora_b)
        )
        return loaded

    def counting_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        counted["engine_steps"] += scheduler_output.total_num_scheduled_tokens > 0
        return execute(scheduler_output, *args, **kwargs)

    manager._load_adapter, runner.execute_model = counting_load, counting_execute
    return counted


def _activate(manager: Any, adapter: Any) -> None:
    with torch.inference_mode():
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)


def _renames(model: Any) -> Any:
    # The model's mapper also fuses q/k/v names, which would break names of single projections: what
    # keeps only the renames is called get_rename_mapper from 0.32 on, get_unstacked_mapper before.
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for method in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper
