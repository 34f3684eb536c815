"""What runs inside the worker of an engine without LoRA: an adapter is folded into the engine's own weights.

Importing this module changes vLLM (``_keep_weights_plain``), so that only an engine does it, which imports
it by name (``worker_extension_cls``) before the model is loaded. It finds the weights; ``folding.py`` writes
them. Whether vLLM has what that takes is tested by ``rollproof_describe``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import supports_lora

from .arena import Place, Received, views
from .folding import Folds, Product
from .kept import Folder
from .worker import EngineWorker, renames


class FoldWorker(EngineWorker):
    """Methods added to vLLM's worker. They run between two steps of the engine."""

    rollproof_folder: Folder | None = None

    def rollproof_describe(self) -> dict[str, Any]:
        """Which module names have weights that can be folded into, why others haven't, and what stands in
        the way of folding at all. Counting begins here."""
        config = self.model_runner.vllm_config
        parallel = config.parallel_config
        found, unserved = _foldable(self.model_runner)
        refused = ""
        if parallel.world_size > 1 or parallel.data_parallel_size > 1:
            refused = f"it runs on {parallel.world_size * parallel.data_parallel_size} devices"
        elif not supports_lora(self.model_runner.get_model()):
            refused = "vLLM knows no LoRA for its model, and so not how the rows of a packed weight lie"
        elif config.model_config.quantization:
            refused = f"its weights are quantised ({config.model_config.quantization})"
        elif not found:
            refused = f"no weight of it can be folded into ({'; '.join(sorted(set(unserved.values())))})"
        device = torch.device(getattr(self.model_runner, "device", "cpu"))
        return {
            "served": sorted({name.rpartition(".")[2] for name in found} - set(unserved)),
            "unserved": unserved,
            "refused": refused,
            "lacking": [],
            "uncounted": self.rollproof_uncounted(),
            "uuid": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        }

    def rollproof_open_folds(
        self, key: str, handle: dict[str, Any], places: list[Place], parts: list[list[Any]], host: bool
    ) -> dict[str, Any]:
        """Map an arena. What is served doesn't change.

        ``parts`` are, module by module, the names in ``places`` of A, B and the magnitude (or None). Says
        which modules have no weight of their own, else how many bytes of unchanged copies the first update
        takes and how many are free. With ``host`` the copies are kept there.
        """
        weights, _ = _foldable(self.model_runner)
        names = [_engine_name(self.model_runner, a) for a, _, _ in parts]
        if missing := [name for name in names if name not in weights]:
            return {"missing": missing, "cost": 0, "room": 0}
        named = [(name, weights[name], part) for name, part in zip(names, parts, strict=True)]
        arena = Received.of(handle, weights[names[0]].device)
        folds = Folds([_products(half, places, named) for half in arena.memory], arena.memory)
        folder = self.rollproof_folder
        if folder is None or not folder.kept.names:
            folder = self.rollproof_folder = Folder(host=host)
        folder.open(key, arena, folds)
        kept, weights = folder.kept, folds.weights
        return {"missing": [], "cost": kept.cost(weights), "room": kept.room(weights)}

    def rollproof_fold(self, key: str, half: int, scales: list[float], top: float) -> None:
        """Have every later step compute with what is in this half of an arena, each product with its scale.

        ``top`` is the largest magnitude in the half. Raises ValueError for a result that isn't finite.
        """
        assert self.rollproof_folder is not None
        self._rollproof_count(self.rollproof_folder.fold(key, half, scales, top))

    def rollproof_unfold(self) -> None:
        """Make every weight what it was, and free the copies."""
        if self.rollproof_folder is not None:
            self.rollproof_folder.unfold()


_Named = tuple[str, torch.Tensor, list[Any]]
"""A module's name, its weight, and the names of its A, B and magnitude (or None) in an arena."""


def _products(half: torch.Tensor, places: list[Place], named: list[_Named]) -> list[Product]:
    found = views(half, places)
    return [
        Product(name, weight, found[a], found[b], None if magnitude is None else found[magnitude][0])
        for name, weight, (a, b, magnitude) in named
    ]


def _engine_name(runner: Any, peft_name: str) -> str:
    """What vLLM calls the module of a tensor that PEFT names so."""
    return str(parse_fine_tuned_lora_name(peft_name, renames(runner.get_model()))[0])


def _foldable(runner: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights [out, in] by the names that modules have unpacked, and why others aren't among them.

    The weight of an embedding is [hidden, vocabulary], as PEFT sees it.
    """
    model, config = runner.get_model(), runner.vllm_config.model_config
    packed = getattr(model, "packed_modules_mapping", None) or {}
    tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
    found: dict[str, torch.Tensor] = {}
    unserved: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, LinearBase | VocabParallelEmbedding):
            continue
        parent, dot, leaf = name.rpartition(".")
        parts = packed.get(leaf, [leaf])
        slices = list(_slices(module, parts))
        if reason := _reason(module, leaf, config.dtype, tied) or (
            "" if slices else "vLLM packs it in a way that isn't known here"
        ):
            unserved |= dict.fromkeys(parts, f"{reason}; another sync may serve it")
        else:
            found |= {f"{parent}{dot}{part}": rows for part, rows in zip(parts, slices, strict=True)}
    return found, unserved


def _slices(module: Any, parts: list[str]) -> Iterator[torch.Tensor]:
    """The rows of a layer's weight for each of its parts; none where they can't be told."""
    weight = module.weight.data if getattr(module, "weight", None) is not None else torch.empty(0)
    if isinstance(module, VocabParallelEmbedding):
        rows = weight[: module.org_vocab_size]
        yield rows if isinstance(module, ParallelLMHead) else rows.t()
        return
    sizes = [len(weight)] if len(parts) == 1 else list(getattr(module, "output_sizes", ()))
    if len(sizes) == len(parts) and sum(sizes) == len(weight):
        yield from weight.split(sizes)


def _reason(module: Any, leaf: str, dtype: torch.dtype, tied: bool) -> str:
    """Why a layer's weight can't be folded into; empty where it can."""
    if not isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return f"it is quantised: {type(module.quant_method).__name__}"
    weight = getattr(module, "weight", None)
    if isinstance(module, VocabParallelEmbedding) and tied:
        return "embedding and output layer are one weight here, and folding would change both"
    if leaf == "kv_b_proj":
        return "its attention computes with another form of this weight"
    looked_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    linear = getattr(module, "cpu_linear", torch.nn.functional.linear)
    if weight is None or weight.dim() != 2 or not (looked_up or linear is torch.nn.functional.linear):
        return "vLLM keeps its weight in a kernel's own format"
    if weight.dtype != dtype:
        return f"its weight is {weight.dtype} in a model of {dtype}"
    return "" if weight.is_contiguous() else "its weight isn't contiguous"


def _keep_weights_plain() -> None:
    """Have vLLM's CPU build compute with the weights as they were loaded.

    It packs them into formats of its kernels' own and drops them, and what is packed can't be written in
    place. Where this vLLM has no such function, ``_reason`` tells by the layers what became of them.
    """
    packing = getattr(layer_utils, "dispatch_cpu_unquantized_gemm", None)
    if packing is None:
        return

    def keep(layer: Any, remove_weight: bool) -> None:
        if layer.weight.dim() == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packing(layer, remove_weight)

    layer_utils.dispatch_cpu_unquantized_gemm = keep


_keep_weights_plain()
