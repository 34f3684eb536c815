"""A rollout without an engine that computes as engines do, and can be wrong by any amount.

In the dtype it is asked for, base and adapter apart, in batches, token by token on the KV it has. Each
fault has a size, so that the smallest one that a clause sees can be found. Nothing here judges.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from faults import CHANGES, scaled
from rollproof.candidates import BASE
from rollproof.oracle import Oracle, _in_dtype
from rollproof.protocol import Adapter, Capability, Completion, GenerateRequest, LoadedAdapter, RolloutSpec

BLOCK = 128
"""KV is reused in units of so many tokens."""

_ASIDE = 10**6
"""Added to a version's number: its like that serves where a fault shows."""


class Model(Oracle):
    """The model as an engine has it: in its dtype, adapters beside the weights."""

    @torch.inference_mode()
    def forward(self, version: int, ids: torch.Tensor, cache: Any, keep: int = 1) -> tuple[torch.Tensor, Any]:
        """The logprobs [rows, keep, vocabulary] after the last ids [rows, n], and the KV so far."""
        model = self._model(version)
        found = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return found.logits.float().log_softmax(-1), found.past_key_values

    def _model(self, version: int) -> Any:
        if version not in self._merged:
            self._merged[version] = _in_dtype(self.unmerged(version), self.dtype)
        return self._merged[version]


@functools.cache
def _model(path: str, dtype: str) -> Model:
    return Model(path, getattr(torch, dtype))


@dataclass(frozen=True)
class Job:
    """A request in the batch. The first ``stale[1]`` prompt tokens are computed by version ``stale[0]``."""

    request: GenerateRequest
    version: int
    stale: tuple[int, int]
    cached: int
    generator: torch.Generator
    done: asyncio.Future[Completion]


class Faulty:
    """Right in everything it declares when ``size`` is 0. ``fault`` is one of CHANGES, or of those here:

    "leak": requests without the adapter get this fraction of it. "stale": so many prompt tokens that were
    seen before keep their KV. "drift": the last so many tokens of an overtaken request are the new
    version's. "scored": prompt_logprobs has a scale that is off by so much. "gap": an overtaken request goes
    on with the new version, where the other faults finish it on the old one, and so many tokens after the
    update are the base model's.
    """

    capabilities = frozenset(
        {
            *(Capability.BASE, Capability.BASE_BEFORE_SYNC, Capability.LOGPROBS, Capability.PREFIX_CACHE),
            *(Capability.SAMPLES, Capability.PROMPT_LOGPROBS, Capability.FINISH_ON_OLD),
            *(Capability.EMBED_TOKENS, Capability.LM_HEAD, Capability.EXPERTS),
        }
    )

    def __init__(self, spec: RolloutSpec, fault: str = "", size: float = 0.0) -> None:
        self.spec = spec
        self._fault, self._size = fault, size
        if fault == "gap":
            self.capabilities = self.capabilities - {Capability.FINISH_ON_OLD} | {Capability.CONTINUE_MIXED}
        self._model = _model(spec.model_path, spec.dtype)
        for version in self._model.versions[1:]:
            self._model.forget(version)
        self._version = BASE
        self._last: Adapter | None = None
        self._seen: dict[tuple[int, ...], int] = {}
        self._waiting: list[Job] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._put(request, request.seed)

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Completion]:
        draw = random.Random(request.seed)
        return list(await asyncio.gather(*(self._put(request, draw.getrandbits(32)) for _ in range(n))))

    async def prompt_logprobs(self, request: GenerateRequest) -> list[float]:
        version = self._serving(request)
        version += _ASIDE if self._fault == "scored" and version else 0
        ids = torch.tensor([request.prompt_token_ids])
        found, _ = self._model.forward(version, ids, None, ids.shape[1])
        return found[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()

    async def update_adapter(self, adapter: Adapter) -> None:
        if adapter.version == self._version:
            return
        change = CHANGES.get(self._fault)
        self._model.add(change(adapter, self._last, self._size) if change else adapter)
        if self._fault in ("leak", "scored"):
            aside = replace(adapter, version=adapter.version + _ASIDE)
            by = self._size - 1 if self._fault == "leak" else self._size
            self._model.add(scaled(aside, None, by))
        self._last, self._version = adapter, adapter.version

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        return [LoadedAdapter("policy", 1)] if self._version else []

    def _serving(self, request: GenerateRequest) -> int:
        if request.adapter or not self._version:
            return self._version
        return self._version + _ASIDE if self._fault == "leak" and self._size else BASE

    def _put(self, request: GenerateRequest, seed: int | None) -> asyncio.Future[Completion]:
        version, prompt = self._serving(request), request.prompt_token_ids
        before = self._seen.get(prompt)
        self._seen[prompt] = version
        whole = (len(prompt) - 1) // BLOCK * BLOCK if before is not None else 0
        keeps = int(self._size) if self._fault == "stale" and before != version else 0
        cached = whole if before == version else min(keeps, whole)
        stale = (before or BASE, cached if before != version else 0)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        generator = torch.Generator().manual_seed(seed or 0)
        self._waiting.append(Job(request, version, stale, cached, generator, done))
        if len(self._waiting) == 1:
            done.get_loop().call_soon(lambda: asyncio.ensure_future(self._work()))
        return done

    async def _work(self) -> None:
        """Everything that was asked in one turn of the event loop, in batches of one shape."""
        batches: dict[tuple[Any, ...], list[Job]] = {}
        for job in self._waiting:
            key = job.version, job.stale, len(job.request.prompt_token_ids), job.request.max_tokens
            batches.setdefault(key, []).append(job)
        self._waiting = []
        await asyncio.gather(*(self._batch(jobs) for jobs in batches.values()))

    async def _batch(self, jobs: Sequence[Job]) -> None:
        (version, (old, kept)), cache = (jobs[0].version, jobs[0].stale), None
        ids = torch.tensor([job.request.prompt_token_ids for job in jobs])
        if kept:
            _, cache = self._model.forward(old, ids[:, :kept], None)
        step, tokens, logprobs = ids[:, kept:], [], []
        serving, missing = version, 0
        for left in range(jobs[0].request.max_tokens, 0, -1):
            if self._fault == "gap" and serving != self._version and version != BASE:
                serving, missing = self._version, int(self._size)
            drifts = self._fault == "drift" and left <= self._size and version != BASE
            now = BASE if missing else self._version if drifts else serving
            missing = max(0, missing - 1)
            found, cache = self._model.forward(now, step, cache)
            step = torch.tensor([[_draw(row, job)] for row, job in zip(found[:, -1], jobs, strict=True)])
            tokens.append(step)
            logprobs.append(found[:, -1].gather(-1, step))
            await asyncio.sleep(0)
        columns = zip(torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), jobs, strict=True)
        for ids_, values, job in columns:
            if not job.done.done():
                job.done.set_result(Completion(tuple(ids_), tuple(values), num_cached_tokens=job.cached))


def _draw(logprobs: torch.Tensor, job: Job) -> int:
    if job.request.temperature == 0:
        return int(logprobs.argmax())
    q = (logprobs / job.request.temperature).softmax(-1)
    return int(torch.multinomial(q, 1, generator=job.generator))


@asynccontextmanager
async def make(spec: RolloutSpec, fault: str = "", size: str = "0") -> AsyncIterator[Faulty]:
    yield Faulty(spec, fault, float(size))
