"""Faults in the life of versions: which update is taken, when, under what name, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rollproof.protocol import Adapter, Completion, GenerateRequest, LoadedAdapter
from rollproof_reference import AsyncRollout

from .case import bad

if TYPE_CHECKING:
    from rollproof_reference.plain import PlainAdapter


class AppliesLater(AsyncRollout):
    """Reports an update when it is queued, and applies it when a request ends (aibrix#235)."""

    _queued: Adapter | None = None

    async def update_adapter(self, adapter: Adapter) -> None:
        self._prepare(adapter)
        self._queued = adapter

    async def generate(self, request: GenerateRequest) -> Completion:
        try:
            return await super().generate(request)
        finally:
            queued, self._queued = self._queued, None
            if queued is not None:
                await super().update_adapter(queued)


class OneVersionBehind(AsyncRollout):
    """Serves the update before the last, but for the first (trl#2856)."""

    _last: Adapter | None = None

    async def update_adapter(self, adapter: Adapter) -> None:
        last, self._last = self._last, adapter
        await super().update_adapter(replace(last or adapter, version=adapter.version))


class LosesTheFirst(AsyncRollout):
    """Loses the first update, while the engine still starts (verl#3541)."""

    _seen = False

    async def update_adapter(self, adapter: Adapter) -> None:
        if self._seen:
            await super().update_adapter(adapter)
        self._seen = True


class LosesEveryThird(AsyncRollout):
    """Loses every third update without a word (sglang#29874)."""

    _count = 0

    async def update_adapter(self, adapter: Adapter) -> None:
        self._count += 1
        if self._count % 3:
            await super().update_adapter(adapter)


class RefusesARepeat(AsyncRollout):
    """Raises where the version that serves is sent again unchanged (dynamo#4769)."""

    def _is_new(self, version: int, prepared: object) -> bool:
        if version == self.version:
            raise ValueError(f"version {version} is loaded already")
        return super()._is_new(version, prepared)


class DropsWhileBusy(AsyncRollout):
    """Skips an update that comes while another runs, and reports success (dynamo#4769)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        if not self._updating.locked():
            await super().update_adapter(adapter)


class RefusesWhileBusy(AsyncRollout):
    """Refuses an update that comes while another runs (AReaL#928)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        if self._updating.locked():
            raise RuntimeError("an update is running")
        await super().update_adapter(adapter)


class RenamesItself(AsyncRollout):
    """Declares a stable id, keeps the number and changes the name (prime-rl#3062)."""

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        self.lora_name = f"policy-{version}"
        await super()._commit(version, plain)


class ListsNothing(AsyncRollout):
    """Lists what its front end registered, which is nothing (vllm#54839)."""

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        return []


class RefusesRankOne(AsyncRollout):
    """Takes the ranks of a list that begins at 2 (prime-rl#1408)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        if adapter.config.r == 1:
            raise ValueError("rank 1 is not supported")
        return super()._prepare(adapter)


class RefusesTheHighestRank(AsyncRollout):
    """Compares a rank with the maximum as if it were one too many (vllm-omni#1397)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        if adapter.config.r >= self.spec.max_lora_rank:
            raise ValueError(f"rank {adapter.config.r} is too large")
        return super()._prepare(adapter)


class CutsHighRanks(AsyncRollout):
    """Cuts a rank above the maximum down to it, and reports success."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        most = self.spec.max_lora_rank
        if adapter.config.r <= most:
            return super()._prepare(adapter)
        config = type(adapter.config)(
            r=most,
            lora_alpha=adapter.config.lora_alpha * most / adapter.config.r,
            target_modules=adapter.config.target_modules,
        )
        cut = {n: t[:most] if ".lora_A." in n else t[:, :most] for n, t in adapter.tensors.items()}
        return super()._prepare(Adapter(adapter.version, config, cut))


class CleansNan(AsyncRollout):
    """Replaces what is not finite by numbers and goes on."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        clean = {name: torch.nan_to_num(tensor, posinf=0.0) for name, tensor in adapter.tensors.items()}
        return super()._prepare(replace(adapter, tensors=clean))


class AppliesTheGoodHalf(AsyncRollout):
    """Serves the modules of an update that came whole, and zeros for one that lost a half (prime-rl#1388)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        names = [f"{name.split('.lora_')[0]}.lora_{half}.weight" for name in adapter.tensors for half in "AB"]
        filled = dict(adapter.tensors)
        for name in names:
            module = name.split(".lora_")[0].removeprefix("base_model.model.")
            if name not in filled and module in self._layers.shapes:
                n_in, n_out = self._layers.shapes[module]
                rank = adapter.config.r
                filled[name] = torch.zeros((rank, n_in) if ".lora_A." in name else (n_out, rank))
        return super()._prepare(replace(adapter, tensors=filled))


class RemovesBeforeItChecks(AsyncRollout):
    """Removes the old adapter first, and then finds that the new one can't be served (SkyRL#2129)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        try:
            await super().update_adapter(adapter)
        except ValueError:
            await self.unload_adapter()
            raise


class BurnsTheNumber(AsyncRollout):
    """Refuses a broken update, and after it the good one of the same version (sglang#30913)."""

    _burnt = 0

    async def update_adapter(self, adapter: Adapter) -> None:
        if adapter.version <= self._burnt:
            raise ValueError(f"version {adapter.version} was seen already")
        try:
            await super().update_adapter(adapter)
        except ValueError:
            if adapter.version != self.version:
                self._burnt = adapter.version
            raise


class NamesNothing(AsyncRollout):
    """Refuses a broken update with an error that says nothing of it (aibrix#235)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        try:
            await super().update_adapter(adapter)
        except ValueError:
            raise ValueError("the update failed") from None


class UpdateHangs(AsyncRollout):
    """Waits for ever in an update that comes while another one runs (sglang#36894)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        if self._updating.locked():
            await asyncio.Event().wait()
        await super().update_adapter(adapter)


CASES = (
    bad(AppliesLater, "SYNC-002", "those of the base model"),
    bad(OneVersionBehind, "SYNC-003", "those of version"),
    bad(LosesTheFirst, "SYNC-002", "those of the base model"),
    bad(LosesEveryThird, "SYNC-003", "those of version"),
    bad(RefusesARepeat, "SYNC-004", "is loaded already"),
    bad(DropsWhileBusy, "SYNC-005", "those of version"),
    bad(RefusesWhileBusy, "SYNC-005", "an update is running"),
    bad(UpdateHangs, "SYNC-005", "update did not return", deadline_scale=0.1),
    bad(RenamesItself, "ID-001", "declares a stable id"),
    bad(ListsNothing, "ID-001 LIFE-001", "lists no adapter"),
    bad(RefusesRankOne, "RANK-001", "rank 1 is not supported"),
    bad(RefusesTheHighestRank, "RANK-001", "is too large"),
    bad(CutsHighRanks, "RANK-003", "no candidate's"),
    bad(CleansNan, "FAIL-001", "success for an adapter with NaN"),
    bad(AppliesTheGoodHalf, "FAIL-001", "a lora_A without its lora_B"),
    bad(RemovesBeforeItChecks, "SYNC-004 RANK-003 FAIL-001 FAIL-003", "those of the base model"),
    bad(BurnsTheNumber, "FAIL-001", "was seen already"),
    bad(NamesNothing, "FAIL-002", "without naming it"),
)
