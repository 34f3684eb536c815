"""A rollout without an engine, for testing the judge alone: the model itself, sampled by transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from rollproof.candidates import BASE, Mixed
from rollproof.oracle import Oracle, Sample
from rollproof.protocol import (
    Adapter,
    Capability,
    Completion,
    GenerateRequest,
    LoadedAdapter,
    RolloutSpec,
)


class Toy:
    """Right in everything it declares. ``fault`` makes it wrong in one way."""

    capabilities = frozenset(
        {Capability.BASE, Capability.BASE_BEFORE_SYNC, Capability.LOGPROBS, Capability.INVENTORY}
    )

    def __init__(self, spec: RolloutSpec, fault: str = "") -> None:
        self.spec = spec
        self.fault = fault
        self._model = Oracle(spec.model_path, getattr(torch, spec.dtype))
        self._version = BASE
        self._seen: dict[tuple[int, ...], int] = {}
        if fault == "stale":
            self.capabilities |= {Capability.PREFIX_CACHE}

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.fault == "dies" and self._version:
            raise RuntimeError("the engine\ndied")
        await asyncio.sleep(0)  # so that requests run side by side
        version = self._version if request.adapter and self.fault != "base" else BASE
        if self.fault == "everywhere":
            version = self._version
        generator = torch.Generator().manual_seed(request.seed or 0)
        prompts = [request.prompt_token_ids]
        args = (prompts, request.max_tokens, request.temperature, generator)
        sample = self._model.sample(version, *args)[0]
        # Logprobs of the right model beside tokens of another: recomputed elsewhere.
        claimed = self._version if request.adapter else BASE
        scores = self._model.score(claimed if self.fault == "base" else version, [sample])[0]
        if self.fault == "stale" and request.adapter:
            return self._on_stale_kv(sample, scores.logprobs)
        logprobs = None if self.fault == "no-logprobs" else tuple(scores.logprobs.tolist())
        return Completion(sample.tokens, logprobs)

    def _on_stale_kv(self, sample: Sample, logprobs: torch.Tensor) -> Completion:
        """As a prefix cache that no update empties would have it."""
        first = self._seen.setdefault(sample.prompt, -1)
        self._seen[sample.prompt] = self._version if first < 0 else first
        hit = 0 if first < 0 else len(sample.prompt) // 2
        if hit and first != self._version:
            stale = Mixed(((first, 0), (self._version, hit)))
            logprobs = self._model.score(stale, [sample])[0].logprobs
        return Completion(sample.tokens, tuple(logprobs.tolist()), num_cached_tokens=hit)

    async def update_adapter(self, adapter: Adapter) -> None:
        if adapter.config.r > self.spec.max_lora_rank:
            raise ValueError(f"rank {adapter.config.r} is too large")
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if adapter.version == self._version:
            if adapter.digest() != self._digest:
                raise ValueError(f"version {adapter.version} came again, with other tensors")
            return
        bad = [name for name, tensor in adapter.tensors.items() if not tensor.isfinite().all()]
        if bad or not adapter.tensors:
            raise ValueError(f"not finite: {bad}, of {len(adapter.tensors)} tensors")
        self._model.add(adapter)
        try:
            self._model.score(adapter.version, [Sample((1, 2), (3,))])  # PEFT refuses what it can't place
        except Exception:
            self._model.forget(adapter.version)
            raise
        if self.fault != "forgets" or self._version == BASE:
            self._version = adapter.version
            self._digest = adapter.digest()

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        return [LoadedAdapter("policy", 1)] if self._version else []


@asynccontextmanager
async def make(spec: RolloutSpec, fault: str = "") -> AsyncIterator[Toy]:
    if fault == "no-start":
        raise RuntimeError("no engine here")
    yield Toy(spec, fault)


def greedy(oracle: Oracle, mix: Mixed, request: GenerateRequest) -> Sample:
    """The tokens that a mix of versions decodes greedily, one after the other."""
    tokens: tuple[int, ...] = ()
    for index in range(request.max_tokens):
        padded = Sample(request.prompt_token_ids, (*tokens, *[0] * (request.max_tokens - index)))
        tokens = (*tokens, int(oracle.score(mix, [padded])[0].top_ids[index]))
    return Sample(request.prompt_token_ids, tokens, request.temperature)
