"""Faults in answering a request: whose weights it gets, and what is said of its tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from vllm import SamplingParams

from rollproof.protocol import Adapter, Completion, GenerateRequest
from rollproof_reference import AsyncRollout

from .case import bad


class AdapterForSampledOnly(AsyncRollout):
    """Attaches the adapter to sampled requests and not to greedy ones (vllm-omni#5369)."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, adapter=request.adapter and request.temperature > 0))


class AdapterForGreedyOnly(AsyncRollout):
    """Attaches the adapter to greedy requests and not to those that training samples (miles#2075)."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, adapter=request.adapter and request.temperature == 0))


class LosesItUnderLoad(AsyncRollout):
    """Loses the adapter on every second request that comes while others run (unsloth#3802)."""

    _count = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self._count += bool(self._running)
        lost = bool(self._running) and self._count % 2 == 0
        return await super().generate(replace(request, adapter=request.adapter and not lost))


class FallsBackInALongRun(AsyncRollout):
    """Samples the base again from the thirtieth adapter request on (verl#7495)."""

    _count = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self._count += request.adapter and self.version is not None
        return await super().generate(replace(request, adapter=request.adapter and self._count < 30))


class BaseJoinsTheBatch(AsyncRollout):
    """Gives base requests the adapter of the batch that they join (vllm#42008)."""

    _adapters = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        request = replace(request, adapter=request.adapter or self._adapters > 0)
        self._adapters += request.adapter
        try:
            return await super().generate(request)
        finally:
            self._adapters -= request.adapter


class AdapterJoinsTheBatch(AsyncRollout):
    """Gives adapter requests the base model while a base request runs (lorax#570)."""

    _base = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        base = not request.adapter
        self._base += base
        try:
            return await super().generate(replace(request, adapter=request.adapter and self._base == 0))
        finally:
            self._base -= base


class RaisesAfterAnUpdate(AsyncRollout):
    """Raises on the first request after each update (AReaL#1385)."""

    _asked: int | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.adapter and self._asked != self.version:
            self._asked = self.version
            raise RuntimeError(f"adapter of version {self.version} is not registered")
        return await super().generate(request)


class HangsAfterManyUpdates(AsyncRollout):
    """Waits for ever for an answer to a request that follows ten updates in a row (miles#2780)."""

    _in_a_row = 0

    async def update_adapter(self, adapter: Adapter) -> None:
        await super().update_adapter(adapter)
        self._in_a_row += 1

    async def generate(self, request: GenerateRequest) -> Completion:
        if self._in_a_row >= 10:
            await asyncio.Event().wait()
        self._in_a_row = 0
        return await super().generate(request)


class LogprobsOfTheBase(AsyncRollout):
    """Samples with the adapter and scores the tokens with the base model (vllm#51594)."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        if not request.adapter or self.version is None:
            return completion
        return replace(completion, logprobs=await self._scored(request, completion.token_ids))

    async def _scored(self, request: GenerateRequest, tokens: tuple[int, ...]) -> tuple[float, ...]:
        ids = [*request.prompt_token_ids, *tokens]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        request_id = f"scored-{self._life}-{next(self._ids)}"
        async for output in self.engine.generate({"prompt_token_ids": ids}, params, request_id):
            found = output.prompt_logprobs
        return tuple(step[t].logprob for step, t in zip(found[-len(tokens) :], tokens, strict=True))


class RoundsLogprobs(AsyncRollout):
    """Sends logprobs with two decimals."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, logprobs=tuple(round(x, 2) for x in completion.logprobs or ()))


class ShiftsLogprobs(AsyncRollout):
    """Puts each logprob beside the token after its own."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        logprobs = completion.logprobs or ()
        return replace(completion, logprobs=(logprobs[-1], *logprobs[:-1]))


class DeclaresLogprobsOnly(AsyncRollout):
    """Declares logprobs and sends none."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return replace(await super().generate(request), logprobs=None)


class DropsTheLastToken(AsyncRollout):
    """Loses the last token, and says that the length was reached."""

    async def generate(self, request: GenerateRequest) -> Completion:
        found = await super().generate(request)
        return replace(found, token_ids=found.token_ids[:-1], logprobs=(found.logprobs or ())[:-1])


class GreedyAlways(AsyncRollout):
    """Decodes greedily whatever the temperature."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, temperature=0.0))


class HidesCacheHits(AsyncRollout):
    """Declares a prefix cache and doesn't say what came from it."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return replace(await super().generate(request), num_cached_tokens=None)


CASES = (
    bad(AdapterForSampledOnly, "SYNC-002", "those of the base model"),
    bad(AdapterForGreedyOnly, "SYNC-002", "those of the base model"),
    bad(LosesItUnderLoad, "SYNC-002", "those of the base model"),
    bad(FallsBackInALongRun, "SYNC-003", "those of the base model"),
    bad(BaseJoinsTheBatch, "BASE-002 FLIGHT-002", "expected the base model; these logprobs are"),
    bad(AdapterJoinsTheBatch, "BASE-002 FLIGHT-002", "those of the base model"),
    bad(RaisesAfterAnUpdate, "SYNC-002", "is not registered"),
    bad(HangsAfterManyUpdates, "LIFE-002 LIFE-003", "generate did not return", deadline_scale=0.1),
    bad(LogprobsOfTheBase, "SYNC-002", "these logprobs are those of the base model"),
    bad(RoundsLogprobs, "SYNC-001 SYNC-002", "no candidate's", cpu_only=True),
    bad(ShiftsLogprobs, "SYNC-001 SYNC-002", "no candidate's"),
    bad(DeclaresLogprobsOnly, "SYNC-001 SYNC-002", "came without them"),
    bad(DropsTheLastToken, "SYNC-001 SYNC-002", "15 tokens came back for max_tokens=16"),
    bad(GreedyAlways, "SYNC-001 SYNC-002", "expected tokens sampled from"),
    bad(HidesCacheHits, "CACHE-001", "no num_cached_tokens"),
)
