"""Faults in the numbers of an adapter: its scale, its precision, and which of its parts arrive."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rollproof.protocol import Adapter
from rollproof_reference import AsyncRollout

from .case import bad

if TYPE_CHECKING:
    from rollproof_reference.plain import PlainAdapter

Tensors = dict[str, torch.Tensor]


class AlphaIsTheScale(AsyncRollout):
    """Multiplies by alpha without dividing by the rank (verl#6380)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        config = copy.deepcopy(adapter.config)
        config.lora_alpha *= config.r
        return super()._prepare(replace(adapter, config=config))


class FirstScaleForEver(AsyncRollout):
    """Keeps the alpha / r of the first adapter for all that follow (vllm#6909)."""

    _ratio: float | None = None

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        config = copy.deepcopy(adapter.config)
        self._ratio = self._ratio or config.lora_alpha / config.r
        config.lora_alpha = self._ratio * config.r
        return super()._prepare(replace(adapter, config=config))


class OffByTwoPercent(AsyncRollout):
    """Has a scale of its own for rsLoRA, 2 % too large: less than bfloat16 noise on any one token."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        by = 1.02 if adapter.config.use_rslora else 1.0
        return replace(plain, tensors={n: t * by if ".lora_B." in n else t for n, t in plain.tensors.items()})


class ScalesAReloadTwice(AsyncRollout):
    """Scales B once more on each load after the first (SkyRL#2250)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        if self.version is None:
            return plain
        scale = adapter.config.lora_alpha / adapter.config.r
        return replace(
            plain, tensors={n: t * scale if ".lora_B." in n else t for n, t in plain.tensors.items()}
        )


class AddsToTheLast(AsyncRollout):
    """Merges each update on top of the one before it (ms-swift#8233)."""

    _last: Tensors | None = None

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        last, self._last = self._last, plain.tensors
        if last is None or last.keys() != plain.tensors.keys():
            return plain
        both = {n: torch.cat([last[n], t], 0 if ".lora_A." in n else 1) for n, t in plain.tensors.items()}
        return replace(plain, rank=max(t.shape[0] for n, t in both.items() if ".lora_A." in n), tensors=both)


class MixesHalves(AsyncRollout):
    """Sends the new A beside the B of the update before (verl#6688)."""

    _last: Tensors | None = None

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        last, self._last = self._last or {}, plain.tensors
        stale = {
            name: last[name]
            for name, tensor in plain.tensors.items()
            if ".lora_B." in name and name in last and last[name].shape == tensor.shape
        }
        return replace(plain, tensors=plain.tensors | stale)


class PadsWithOldRows(AsyncRollout):
    """Fills up a smaller rank with the rows that the adapter before it left there (vllm#31994)."""

    _last: Tensors | None = None

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        last, self._last = self._last or {}, plain.tensors
        tensors = {name: _padded(name, t, last.get(name, t)) for name, t in plain.tensors.items()}
        return replace(plain, rank=max(min(t.shape) for t in tensors.values()), tensors=tensors)


def _padded(name: str, tensor: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    dim = 0 if ".lora_A." in name else 1
    have, had = tensor.shape[dim], old.shape[dim]
    return tensor if had <= have else torch.cat([tensor, old.narrow(dim, have, had - have)], dim).contiguous()


class RoundsToBfloat16(AsyncRollout):
    """Ships a float32 adapter as bfloat16 (vllm-ascend#3668)."""

    way = torch.bfloat16

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        rounded = {name: tensor.to(self.way).to(tensor.dtype) for name, tensor in adapter.tensors.items()}
        return super()._prepare(replace(adapter, tensors=rounded))


class RoundsToFloat16(RoundsToBfloat16):
    """Ships a float32 adapter as float16."""

    way = torch.float16


class _Leaves(AsyncRollout):
    def _left_out(self, name: str) -> bool:
        raise NotImplementedError

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        tensors = {n: torch.zeros_like(t) if self._left_out(n) else t for n, t in plain.tensors.items()}
        return replace(plain, tensors=tensors)


class SkipsTheLastLayer(_Leaves):
    """Ends its loop over the layers one too early (AReaL#1145)."""

    def _left_out(self, name: str) -> bool:
        return ".layers.1." in name


class LeavesOutOProj(_Leaves):
    """Serves the modules of a list of its own, and o_proj isn't in it (vllm#55193)."""

    def _left_out(self, name: str) -> bool:
        return ".o_proj." in name


class HalfOfTheHeads(AsyncRollout):
    """Fills q's heads on the first of two shards alone (vllm#21471)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        for name, tensor in plain.tensors.items():
            if ".q_proj.lora_B." in name:
                tensor[len(tensor) // 2 :] = 0
        return plain


class PacksWholeGroupsOnly(AsyncRollout):
    """Packs q, k and v together, and drops them where not all three came (vllm#41754)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        packed = ("q_proj", "k_proj", "v_proj")
        if not 0 < len(set(packed) & set(plain.target_modules)) < len(packed):
            return plain
        zeroed = {
            name: torch.zeros_like(t) if any(f".{leaf}." in name for leaf in packed) else t
            for name, t in plain.tensors.items()
        }
        return replace(plain, tensors=zeroed)


class CountsLayersFromTheFirst(AsyncRollout):
    """Numbers the layers that an adapter has, not those of the model (AReaL#1145)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        if any(".layers.0." in name for name in plain.tensors):
            return plain
        return replace(
            plain, tensors={n.replace(".layers.1.", ".layers.0."): t for n, t in plain.tensors.items()}
        )


CASES = (
    bad(AlphaIsTheScale, "SYNC-002", "no candidate's"),
    bad(FirstScaleForEver, "NUM-003", "'lora_alpha': 1"),
    bad(OffByTwoPercent, "NUM-003", "'use_rslora': True"),
    bad(ScalesAReloadTwice, "SYNC-003", "no candidate's"),
    bad(AddsToTheLast, "SYNC-003", "no candidate's"),
    bad(MixesHalves, "SYNC-003", "no candidate's"),
    bad(PadsWithOldRows, "RANK-001", "no candidate's"),
    bad(RoundsToBfloat16, "SYNC-002", "no candidate's", cpu_only=True),
    bad(RoundsToFloat16, "SYNC-002", "no candidate's", cpu_only=True),
    bad(SkipsTheLastLayer, "SYNC-002", "no candidate's"),
    bad(LeavesOutOProj, "SYNC-002", "no candidate's"),
    bad(HalfOfTheHeads, "SYNC-002", "no candidate's"),
    bad(PacksWholeGroupsOnly, "NUM-001", "an adapter on k_proj alone"),
    bad(CountsLayersFromTheFirst, "NUM-002", "an adapter on layer 1 alone"),
)
