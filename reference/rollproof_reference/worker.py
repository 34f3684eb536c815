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

from .arena import Place, Received, views
from .copying import Copies


class EngineWorker:
    """What is added to vLLM's worker, however adapters come: counters, processes, reading weights again."""

    model_runner: Any
    rollproof_counted: dict[str, int] | None = None

    def rollproof_counters(self) -> dict[str, int]:
        """How often this worker took an adapter's weights, their bytes, and the model's forward passes."""
        if self.rollproof_counted is None:
            self.rollproof_counted = _count(self.model_runner)
        return self.rollproof_counted

    def rollproof_uncounted(self) -> str:
        """Begin to count; what this vLLM lacks for it."""
        try:
            self.rollproof_counters()
        except AttributeError as error:
            return str(error)
        return ""

    def rollproof_processes(self) -> list[int]:
        """This process and the one that started it: the engine's own, or the rollout's."""
        return [os.getpid(), os.getppid()]

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
        if (manager := getattr(runner, "lora_manager", None)) is not None:
            # What the kernels read of the last batch was dropped too; vLLM rewrites it for another mapping
            # only.
            manager._adapter_manager._last_mapping = None

    def _rollproof_count(self, size: int) -> None:
        if (counted := self.rollproof_counted) is not None:
            counted["adapter_reads"] += 1
            counted["adapter_bytes"] += size


class AdapterWorker(EngineWorker):
    """Methods added to the worker of an engine with LoRA. They run between two steps of the engine."""

    rollproof_arenas: dict[str, _Arena] | None = None

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
        modules = getattr(manager, "modules", {})
        wrapped = {name: packed.get(name, [name]) for name in modules}
        served = {part.rpartition(".")[2] for parts in wrapped.values() for part in parts}
        odd = {
            part.rpartition(".")[2]
            for name, parts in wrapped.items()
            for part in parts
            if not _is_flat(modules[name], len(parts))
        }
        if not all(hasattr(manager, name) for name in ("pin_adapter", "lora_index_to_id")):
            odd = served
        device = torch.device(getattr(self.model_runner, "device", "cpu"))
        return {
            "served": sorted(served),
            "lacking": lacking,
            "uncounted": self.rollproof_uncounted(),
            "arena": sorted(served - odd),
            "max_lora_rank": getattr(getattr(manager, "lora_config", None), "max_lora_rank", 0),
            "uuid": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        }

    def rollproof_swap(self, int_id: int, config: dict[str, Any], blob: bytes) -> None:
        """Serve the tensors of a safetensors ``blob`` under ``int_id`` from the next step on.

        The new adapter is built before the old one goes; if activating it fails, the old one is
        put back and the error raised.
        """
        from safetensors.torch import load

        self._rollproof_count(len(blob))
        worker_manager = self.model_runner.lora_manager
        device = str(worker_manager._adapter_manager.device)  # vLLM pins each tensor that stays on the host
        replace_adapter(worker_manager, built_adapter(worker_manager, int_id, config, load(blob), device))

    def rollproof_open(
        self,
        key: str,
        config: dict[str, Any],
        handle: dict[str, Any],
        places: list[Place],
    ) -> None:
        """Map an arena. What is served doesn't change."""
        arenas = self.rollproof_arenas = self.rollproof_arenas or {}
        arenas[key] = _Arena(self.model_runner.lora_manager, config, handle, places)

    def rollproof_commit(self, key: str, int_id: int, half: int, again: bool) -> bool:
        """Serve what is in this half of an arena under ``int_id`` from the next step on.

        With ``again`` nothing that vLLM has loaded is relied on. False, and nothing has changed, where a
        number in the half isn't finite.
        """
        arenas = self.rollproof_arenas or {}
        arena = arenas[key]
        arena.received.receive(half)
        if not arena.received.finite(half):
            return False
        self._rollproof_count(arena.received.bytes)
        arena.commit(int_id, half, again)
        self.rollproof_arenas = {key: arena}
        return True


class _Arena:
    """Two halves of shared memory, each an adapter in the form that vLLM keeps one in.

    vLLM's registered adapter is a view of the half that serves, so that whatever makes vLLM load it
    once more gives the newest weights.
    """

    def __init__(
        self,
        worker_manager: Any,
        config: dict[str, Any],
        handle: dict[str, Any],
        places: list[Place],
    ) -> None:
        self._worker_manager = worker_manager
        self._manager = worker_manager._adapter_manager
        device = self._manager.device
        self.received = Received.of(handle, device)
        self._memory = self.received.memory
        self._loras = []
        for half in self._memory:
            self._model = built_adapter(worker_manager, 1, config, views(half, places), device=str(device))
            self._manager._create_merged_loras_inplace(self._model)
            self._loras.append(self._model.loras)
        self._copies = {(half, 0): Copies(self._pairs(half, 0)) for half in (0, 1)}

    def commit(self, int_id: int, half: int, again: bool) -> None:
        """Have every later step compute with this half, which was received."""
        manager, model = self._manager, self._model
        if again or manager.get_adapter(int_id) is not model or int_id not in manager.lora_index_to_id:
            model.id, model.loras = int_id, self._loras[half]
            replace_adapter(self._worker_manager, model)
            manager.pin_adapter(int_id)
        else:
            place = half, manager.lora_index_to_id.index(int_id)
            if place not in self._copies:
                self._copies[place] = Copies(self._pairs(*place))
            with torch.inference_mode():
                self._copies[place]()
            model.loras = self._loras[half]
        self.received.used()

    def _pairs(self, half: int, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(what the kernels read, what is shared) for each tensor of a half. Raises ValueError."""
        pairs = []
        for name, lora in self._loras[half].items():
            if (module := self._manager.modules.get(name)) is None:
                raise ValueError(f"vLLM puts no adapter on {name!r}")
            for stacked, found in (
                (module.lora_a_stacked, lora.lora_a),
                (module.lora_b_stacked, lora.lora_b),
            ):
                slices = found if isinstance(found, list) else [found]
                pairs += [(to[slot, 0], of) for to, of in zip(stacked, slices, strict=True) if of is not None]
        mine = self._memory.untyped_storage().data_ptr()
        if any(of.untyped_storage().data_ptr() != mine for _, of in pairs):
            raise ValueError("this vLLM copied the arena's tensors where it has to share them")
        return pairs


def built_adapter(
    worker_manager: Any,
    int_id: int,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    device: str,
) -> Any:
    """An adapter as vLLM keeps one, from a PEFT config and tensors by PEFT's names."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(worker_manager.lora_config)
    return LoRAModel.from_lora_tensors(
        lora_model_id=int_id,
        tensors=tensors,
        peft_helper=helper,
        device=device,
        dtype=worker_manager.lora_config.lora_dtype,
        model_vocab_size=getattr(worker_manager, "vocab_size", None),
        weights_mapper=renames(worker_manager._adapter_manager.model),
    )


def replace_adapter(worker_manager: Any, new: Any) -> None:
    """Load an adapter in the place of the one with its id, which is put back if that fails."""
    manager = worker_manager._adapter_manager
    old = manager.get_adapter(new.id)
    manager.remove_adapter(new.id)
    try:
        _activate(manager, new)
    except Exception:
        manager.remove_adapter(new.id)
        if old is not None:
            _activate(manager, old)
        raise


def _is_flat(module: Any, n_slices: int) -> bool:
    """Whether a layer keeps, for each slice and slot, A as [rank, in] and B as [out, rank], whole.

    Not so an embedding, experts, and whatever is split between GPUs.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    stacked = getattr(module, "lora_a_stacked", ())
    return (
        isinstance(module, BaseLinearLayerWithLoRA)
        and getattr(module, "tp_size", 2) == 1
        and len(stacked) == n_slices
        and all(tensor.dim() == 4 for tensor in stacked)
    )


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
    manager, execute = getattr(runner, "lora_manager", None), runner.execute_model

    def counting_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        counted["engine_steps"] += scheduler_output.total_num_scheduled_tokens > 0
        return execute(scheduler_output, *args, **kwargs)

    if manager is None:
        runner.execute_model = counting_execute
        return counted
    load = manager._load_adapter

    def counting_load(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        counted["adapter_reads"] += 1
        counted["adapter_bytes"] += sum(
            half.numel() * half.element_size()
            for layer in loaded.loras.values()
            for half in (layer.lora_a, layer.lora_b)
        )
        return loaded

    manager._load_adapter, runner.execute_model = counting_load, counting_execute
    return counted


def _activate(manager: Any, adapter: Any) -> None:
    with torch.inference_mode():
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)


def renames(model: Any) -> Any:
    """What maps the names of Hugging Face's modules to those of vLLM's model, one by one."""
    # The model's mapper also fuses q/k/v names, which would break names of single projections: what
    # keeps only the renames is called get_rename_mapper from 0.32 on, get_unstacked_mapper before.
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for method in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper
