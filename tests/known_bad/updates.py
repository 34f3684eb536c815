"""Faults in taking an update: what is lost, kept, scaled, shared or swallowed on the way in."""

from __future__ import annotations

import asyncio
import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.protocol import Adapter, Completion, GenerateRequest
from rollproof_reference import AsyncRollout

if TYPE_CHECKING:
    from rollproof_reference.plain import PlainAdapter


class KeepsAbsentModules(AsyncRollout):
    """Leaves a slot's old weights where the new adapter has no such module (sglang#8103)."""

    _last: PlainAdapter | None = None

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        if self._last is not None:
            tensors = self._last.tensors | plain.tensors
            leaves = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
            rank = max(plain.rank, self._last.rank)
            plain = replace(plain, rank=rank, tensors=tensors, target_modules=tuple(sorted(leaves)))
        self._last = plain
        return plain


class DropsRsLora(AsyncRollout):
    """Scales by alpha / r also where the config says alpha / sqrt(r) (vllm#6909)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        config = copy.deepcopy(adapter.config)
        config.use_rslora = False
        return super()._prepare(replace(adapter, config=config))


class IgnoresPatterns(AsyncRollout):
    """Gives every module the scale of the config's r and lora_alpha, as vLLM 0.25 does."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        config = adapter.config
        for name, tensor in plain.tensors.items():
            if ".lora_B." in name and (config.rank_pattern or config.alpha_pattern):
                original = adapter.tensors[name].to(tensor)
                rate = math.sqrt(config.r) if config.use_rslora else config.r
                plain.tensors[name] = original * (config.lora_alpha / rate)
        return plain


class ScalesTheTrainers(AsyncRollout):
    """Folds the scale into the trainer's own B (unsloth-zoo#941)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        for name, tensor in adapter.tensors.items():
            tensor.copy_(plain.tensors[name])
        return plain


class ReadsLate(AsyncRollout):
    """Keeps views of the trainer's tensors and reads them when the next request comes (verl#6688)."""

    _late: Adapter | None = None

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await super()._commit(version, plain)
        self._late = self._checked

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        self._checked = adapter
        return super()._prepare(adapter)

    async def generate(self, request: GenerateRequest) -> Completion:
        if self._late is not None:
            late, self._late = self._late, None
            await super()._commit(late.version, super()._prepare(late))
        return await super().generate(request)

    async def unload_adapter(self) -> None:
        self._late = None
        await super().unload_adapter()


class SkipsWhatItCannotPlace(AsyncRollout):
    """Drops tensors of unknown names and calls the rest an update (vllm#34186, verl#3231)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        known = {
            name: tensor
            for name, tensor in adapter.tensors.items()
            if name.removeprefix("base_model.model.").split(".lora_")[0] in self._layers.shapes
        }
        if known or not adapter.tensors:
            await super().update_adapter(replace(adapter, tensors=known))


class SwallowsErrors(AsyncRollout):
    """Logs a refused update and reports success (aibrix#235, sglang#31831)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        try:
            await super().update_adapter(adapter)
        except ValueError:
            return


class TakesAVersionTwice(AsyncRollout):
    """Serves other tensors under a version that was already served."""

    def _is_new(self, version: int, prepared: object) -> bool:
        return self.version is None or version >= self.version


class Races(AsyncRollout):
    """Lets updates overtake each other: here the one that came first is the slow one (AReaL#928)."""

    _beside = 0

    async def update_adapter(self, adapter: Adapter) -> None:
        plain = self._prepare(adapter)
        if not self._is_new(adapter.version, plain):
            return
        self._beside += 1
        try:
            await asyncio.sleep(0.3 if self._beside == 1 else 0.0)
            await self._commit(adapter.version, plain)
        finally:
            self._beside -= 1


class CutsOddRanks(AsyncRollout):
    """Serves a rank that the engine has no size for by cutting it to the next lower one."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        kept = max(size for size in (1, 8, 16) if size <= plain.rank)
        if adapter.config.rank_pattern or kept == plain.rank:
            return plain
        cut = {name: t[:kept] if ".lora_A." in name else t[:, :kept] for name, t in plain.tensors.items()}
        return replace(plain, rank=kept, tensors={name: t.contiguous() for name, t in cut.items()})
