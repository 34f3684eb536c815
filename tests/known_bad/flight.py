"""Faults that only requests in flight, or KV that others hold, bring to light."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest

from rollproof.protocol import Adapter, Capability, Completion, GenerateRequest
from rollproof_reference import AsyncRollout

if TYPE_CHECKING:
    from rollproof_reference.plain import PlainAdapter

_POLICY = frozenset({Capability.CONTINUE_MIXED})


class ClaimsToFinishOnOld(AsyncRollout):
    """Says that requests in flight end on the old version, and replaces its weights under them."""

    capabilities = AsyncRollout.capabilities - _POLICY | {Capability.FINISH_ON_OLD}


class ClaimsToRestart(AsyncRollout):
    """Says that requests in flight begin again, and lets them go on."""

    capabilities = AsyncRollout.capabilities - _POLICY | {Capability.RESTART}


class BaseWhileUpdating(AsyncRollout):
    """Finds no adapter listed while one is being replaced, and samples the base (as verl's generate does)."""

    def _lora_request(self) -> LoRARequest | None:
        return None if self._updating.locked() else super()._lora_request()

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await asyncio.sleep(0.1)
        await super()._commit(version, plain)


class RemovesUnderRequests(AsyncRollout):
    """Drops what runs when an adapter is replaced, and answers with what was there (SkyRL#2129)."""

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await self.engine.abort(list(self._running))
        await super()._commit(version, plain)


class CancelsThemAll(AsyncRollout):
    """Aborts every request in the engine when the caller of one is cancelled."""

    async def generate(self, request: GenerateRequest) -> Completion:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            await self.engine.abort(list(self._running))
            raise


class ResetsWhileBusy(AsyncRollout):
    """Has one salt for all versions and resets the cache, which is refused while KV is held (vllm#28827)."""

    def _cache_salt(self) -> str | None:
        return "policy"

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await super()._commit(version, plain)
        await self.engine.reset_prefix_cache()  # nobody looks at what it returns


class SaltOfOneDigit(AsyncRollout):
    """Salts with the last digit of a count, so that every tenth version finds old KV (vllm#30931)."""

    def _cache_salt(self) -> str | None:
        return f"policy-{self._life}-{self._epoch % 10}"


class RemembersAnswers(AsyncRollout):
    """Keeps answers by prompt, and gives the adapter's to those who ask the base model, and vice versa."""

    _answers: dict[tuple[object, ...], tuple[bool, Completion]]

    async def generate(self, request: GenerateRequest) -> Completion:
        self._answers = getattr(self, "_answers", {})
        key = (request.prompt_token_ids, request.max_tokens, request.temperature, self.version)
        adapter, known = self._answers.get(key, (request.adapter, None))
        if known is not None and adapter != request.adapter:
            return known
        completion = await super().generate(request)
        self._answers[key] = request.adapter, completion
        return completion


class DropsTheSaltUnderLoad(AsyncRollout):
    """Sends requests without the version's salt once more than eight run."""

    def _cache_salt(self) -> str | None:
        return super()._cache_salt() if len(self._running) < 8 else None


class FinishesOnOld(AsyncRollout):
    """Right, but otherwise: an update waits until what runs has ended."""

    capabilities = AsyncRollout.capabilities - _POLICY | {Capability.FINISH_ON_OLD}

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._idle = asyncio.Condition()

    async def generate(self, request: GenerateRequest) -> Completion:
        async with self._idle:
            await self._idle.wait_for(lambda: not self._updating.locked())
        try:
            return await super().generate(request)
        finally:
            async with self._idle:
                self._idle.notify_all()

    async def update_adapter(self, adapter: Adapter) -> None:
        try:
            await super().update_adapter(adapter)
        finally:
            async with self._idle:
                self._idle.notify_all()

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await self._drained()
        await super()._commit(version, plain)

    async def _drained(self) -> None:
        async with self._idle:
            await self._idle.wait_for(lambda: not self._running)


class AbortsInFlight(RemovesUnderRequests):
    """Right, but otherwise: what runs is aborted by an update, and comes back as such."""

    capabilities = AsyncRollout.capabilities - _POLICY | {Capability.ABORT_IN_FLIGHT}


class Restarts(AsyncRollout):
    """Right, but otherwise: what runs during an update is begun again under the new version."""

    capabilities = AsyncRollout.capabilities - _POLICY | {Capability.RESTART}

    async def generate(self, request: GenerateRequest) -> Completion:
        while True:
            async with self._updating:  # until an update that runs is through
                epoch = self._epoch
            completion = await super().generate(request)
            if not request.adapter or (epoch == self._epoch and not self._updating.locked()):
                return completion
