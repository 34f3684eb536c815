"""The reference rollout: async generation on vLLM that always samples the newest adapter.

What it does, and each of these is a fault that somebody shipped by leaving it out:

1. The engine is started with room for an adapter of the trainer's rank.
2. One adapter name and int id for life; each update replaces the weights under that id, so no old
   adapter stays behind.
3. Every adapter request carries the LoRARequest. Without one vLLM samples the base model silently.
4. Every update starts a new cache salt, so no request reads KV that older weights computed (vLLM
   keys its prefix cache by the adapter's name, not by its weights).
5. An update is checked whole before anything changes, and happens whole or not at all.

Requests in flight during an update go on with the new weights and the KV they have ("continue-mixed").
With a strategy that merges the adapter into the engine's weights (sync/fold.py) there is no id and no
LoRARequest (2 and 3), and no base model beside the adapter.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.lora.request import LoRARequest

from rollproof.protocol import (
    Adapter,
    Capability,
    Completion,
    GenerateRequest,
    LoadedAdapter,
    RolloutSpec,
)

from .check import AdapterError, Checker, layout
from .engine import can_sleep, describe
from .layers import model_layers
from .sampling import (
    ROUTES,
    check_request,
    completions,
    prompt_scores,
    sampling_params,
    scoring_params,
)

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from .sync import Sync

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_ABORT_SECONDS = 30
_UPDATE_SECONDS = 30
# Which models take an adapter here is up to vLLM: a Llama does, a Qwen2 doesn't.
_ENDS = {"embed_tokens": Capability.EMBED_TOKENS, "lm_head": Capability.LM_HEAD}
# What takes an engine that tells adapters and base model apart.
_BY_ID = {Capability.BASE, Capability.INVENTORY, Capability.STABLE_ID}


class RolloutClosedError(RuntimeError):
    """The rollout was closed before, or while, this call ran."""


class AsyncRollout:
    """An AsyncLLM and the adapter it serves. Use it from one event loop; ``make`` (start.py) starts one."""

    capabilities = frozenset(
        {
            Capability.BASE,
            Capability.BASE_BEFORE_SYNC,
            Capability.LOGPROBS,
            Capability.PREFIX_CACHE,
            Capability.INVENTORY,
            Capability.STABLE_ID,
            Capability.CONTINUE_MIXED,
            Capability.CANCEL,
            Capability.ROUTES,
            Capability.SAMPLES,
            Capability.PROMPT_LOGPROBS,
            Capability.UNLOAD,
            Capability.COUNTERS,
            Capability.PROCESSES,
        }
    )
    routes = ROUTES
    inventory_bound = 1
    lora_name = "rollproof-policy"
    lora_int_id = 1

    def __init__(
        self,
        engine: AsyncLLM,
        spec: RolloutSpec,
        sync: Sync[Any],
        served: list[str],
        unserved: dict[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.sync = sync
        self.details = describe(engine) | {"sync": sync.name}
        self.version: int | None = None
        self._layers = model_layers(spec.model_path)
        self._checker = Checker(
            partial(
                layout,
                layers=self._layers,
                served=served,
                max_rank=spec.max_lora_rank,
                dtype=getattr(torch, spec.dtype),
                dora=sync.merges,
                unserved=unserved,
            )
        )
        self.served = served
        self._asleep = 0
        self.capabilities = type(self).capabilities | {_ENDS[name] for name in _ENDS if name in served}
        if sync.merges:
            self.capabilities -= _BY_ID
        if can_sleep(engine):
            self.capabilities |= {Capability.SLEEP}
        self._rank: int | None = None
        self._path: str | None = None
        self._life = uuid.uuid4().hex[:8]
        self._epoch = 0
        self._updating = asyncio.Lock()
        self._running: set[str] = set()
        self._ids = itertools.count()
        self._closed = False

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, from the newest adapter or from the base model.

        Raises ValueError for a prompt that doesn't fit or an unknown route, and RolloutClosedError once
        closed.
        """
        return (await self.generate_n(request, 1))[0]

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Completion]:
        """Sample ``n`` completions of one prompt, each with a seed of its own (see ``generate``)."""
        check_request(request, self.spec.max_model_len)
        outputs, version = await self._ask(request, sampling_params(request, n))
        return completions(outputs, version)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """Sample one completion (see ``generate``) and give it in pieces, each as soon as it is there."""
        asked = replace(request, route="stream")
        check_request(asked, self.spec.max_model_len)
        async with aclosing(self._outputs(asked, sampling_params(asked))) as outputs:
            async for output in outputs:
                (piece,) = completions([output], None)
                yield piece

    async def prompt_logprobs(self, request: GenerateRequest) -> list[float]:
        """Score the prompt's tokens but the first, under the newest adapter or the base model.

        On models whose output layer can take an adapter, vLLM may not have other requests beside it.
        """
        asked = replace(request, max_tokens=1, route="default")
        outputs, _ = await self._ask(asked, scoring_params())
        return prompt_scores(outputs[-1])

    async def update_adapter(self, adapter: Adapter) -> None:
        """Serve ``adapter`` from now on; on any error the old one still serves.

        The tensors may be overwritten as soon as this returns. Cancelled before the weights travel
        it changes nothing; after that it finishes first. Updates run one after another.
        """
        async with self._updating:
            self._check_open()
            # A thread keeps the loop free for requests, and costs more than a fast strategy takes.
            if self.sync.in_thread:
                prepared = await asyncio.to_thread(self._prepare, adapter)
            else:
                prepared = self._prepare(adapter)
            if self._is_new(adapter.version, prepared):
                await _to_the_end(self._commit(adapter.version, prepared))

    async def unload_adapter(self) -> None:
        """Drop the adapter: afterwards the rollout samples the base model, as before the first update.

        Raises RuntimeError while requests run: one of them could need the adapter at its next step.
        """
        async with self._updating:
            self._check_open()
            self._check_idle()
            self.version, self._rank, self._path = None, None, None
            self._epoch += 1
            self.sync.unloaded()
            await _to_the_end(self._restore())

    async def sleep(self, level: int) -> None:
        """Free the device's memory until ``wake``: level 1 keeps the weights on the host, 2 drops them.

        Raises RuntimeError while requests run. Until ``wake`` every other call does.
        """
        if level not in (1, 2):
            raise ValueError(f"level is {level!r}; allowed: 1, 2")
        async with self._updating:
            self._check_open()
            self._check_idle()
            self._asleep = level
            if self.sync.merges:
                # So that what is kept, or read again, are the base weights, and there is one copy of them.
                await self.engine.collective_rpc("rollproof_unfold")
            await self.engine.sleep(level)

    async def wake(self) -> None:
        """Serve again what was served before ``sleep``."""
        async with self._updating:
            if self._closed or not self._asleep:
                raise RuntimeError("the rollout doesn't sleep")
            await self.engine.wake_up()
            if self._asleep == 2:
                # The adapter's buffers went with the base weights.
                await self.engine.collective_rpc("rollproof_reload")
            if self._asleep == 2 or self.sync.merges:
                await self._restore()
            self._epoch += 1
            self._asleep = 0

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        """What the engine itself lists, with the name and rank of the one that this rollout loaded."""
        self._check_open()
        if self.sync.merges:
            raise RuntimeError(f"with sync={self.sync.name} the engine knows of no adapter, and lists none")
        return [
            LoadedAdapter(self.lora_name, int_id, self._rank)
            if int_id == self.lora_int_id
            else LoadedAdapter(f"not loaded by this rollout ({int_id})", int_id)
            for int_id in sorted(await self.engine.list_loras())
        ]

    async def counters(self) -> dict[str, int]:
        """What updates and generation cost so far, as the first of the engine's workers counts it."""
        self._check_open()
        return dict((await self.engine.collective_rpc("rollproof_counters"))[0])

    async def process_ids(self) -> list[int]:
        """This process, the engine's and its workers'."""
        self._check_open()
        return sorted({os.getpid()}.union(*await self.engine.collective_rpc("rollproof_processes")))

    async def close(self) -> None:
        """Abort the requests that run (they raise RolloutClosedError), wait for an update, stop the engine.

        Closing twice is harmless.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                while self._running and not self.engine.errored:
                    # One that is just starting isn't known to the engine yet, so once isn't enough.
                    await self.engine.abort(list(self._running))
                    await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(_UPDATE_SECONDS), self._updating:
                pass  # those still waiting for their turn will find the rollout closed
        except TimeoutError:
            _log.warning("an update still runs after %d s; stopping the engine under it", _UPDATE_SECONDS)
        finally:
            self.engine.shutdown()
            self.sync.close()

    async def _ask(
        self, request: GenerateRequest, params: SamplingParams
    ) -> tuple[list[RequestOutput], int | None]:
        """All that vLLM gives for a request, and the version that served the whole of it, where known."""
        version = self.version
        outputs = [output async for output in self._outputs(request, params)]
        # Across an update the tokens are mixed, and which is the first new one isn't known here.
        known = request.adapter and version == self.version
        return outputs, version if known else None

    async def _outputs(
        self, request: GenerateRequest, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_open()
        check_request(request, self.spec.max_model_len)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
        lora, epoch = self._lora_request() if request.adapter else None, self._epoch
        self._check_base(request, epoch)
        # In weights that change, the base model's KV too is of one epoch alone.
        if (lora is not None or self.sync.merges) and (salt := self._cache_salt()) is not None:
            prompt["cache_salt"] = salt
        request_id = f"rollproof-{self._life}-{next(self._ids)}"
        self._running.add(request_id)
        try:
            found = self.engine.generate(prompt, params, request_id, lora_request=lora)
            async with aclosing(found) as outputs:
                async for output in outputs:
                    self._check_base(request, epoch)
                    yield output
        finally:
            self._running.discard(request_id)
        if self._closed:
            raise RolloutClosedError("the rollout was closed while this request ran, and aborted it")

    def _lora_request(self) -> LoRARequest | None:
        """The adapter that a request starting now is served with; None where none is needed."""
        if not self._path:
            return None
        return LoRARequest(self.lora_name, self.lora_int_id, self._path)

    def _cache_salt(self) -> str | None:
        """Never equal to the adapter's name: vLLM before 0.32 keeps both untagged in one cache key."""
        return f"rollproof-{self._life}-{self._epoch}"

    def _is_new(self, version: int, prepared: Any) -> bool:
        if self.version is None or version > self.version:
            return True
        if version < self.version:
            raise AdapterError(f"version {version} came after version {self.version}; versions never shrink")
        if not self.sync.holds(prepared):
            raise AdapterError(
                f"version {version} came again with other tensors or another config; "
                "give a changed adapter a higher version"
            )
        return False

    def _prepare(self, adapter: Adapter) -> Any:
        """Check an adapter whole and copy its numbers, in the strategy's own form."""
        return self.sync.prepare(adapter, self._checker.layout(adapter))

    async def _restore(self) -> None:
        await self.sync.restore(self.engine, self.lora_name, self.lora_int_id)

    async def _commit(self, version: int, prepared: Any) -> None:
        self._epoch += 1  # with merged weights, base requests in flight end here
        try:
            path = await self.sync.push(self.engine, self.lora_name, self.lora_int_id, prepared)
        finally:
            # Also after an error: whatever KV was computed meanwhile is nobody's any more.
            self._epoch += 1
        self.version, self._rank, self._path = version, prepared.rank, path

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutClosedError("the rollout is closed; start another with make()")
        if self._asleep:
            raise RuntimeError(f"the rollout sleeps at level {self._asleep}; wake it first")

    def _check_base(self, request: GenerateRequest, epoch: int) -> None:
        """Raise for a request to the base model where the weights aren't its own, or weren't all the time."""
        if request.adapter or not self.sync.merges or (self.version is None and self._epoch == epoch):
            return
        raise RuntimeError(
            f"with sync={self.sync.name} the adapter is part of the engine's own weights, so the base model "
            "can be served before the first update alone; unload the adapter, or use another sync"
        )

    def _check_idle(self) -> None:
        if self._running:
            raise RuntimeError(f"{len(self._running)} requests are running; await or cancel them first")


async def _to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end even if the caller is cancelled, and only then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if (failure := task.exception()) is not None:
            _log.warning("the cancelled update failed, and the old adapter still serves: %s", failure)
        raise cancelled
    return task.result()
