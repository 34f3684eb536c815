"""Sync at the speed of memory: a buffer that trainer and engine both map, in the engine's own layout.

An update is one copy into the half of the buffer that the engine doesn't look at, and a word to the
engine's worker, which copies that half into the memory that its kernels read, between two steps.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..arena import Arena, Filled, filled
from ..plain import PlainAdapter, plain_config
from .tensors import IN_MEMORY, TensorSync

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import Adapter

    from ..check import Layout

_log = logging.getLogger(__name__)


class ArenaSync:
    """Keeps one arena for the modules that the adapter is on; another set of modules gets a new one.

    ``worker`` is what ``rollproof_describe`` gives. An adapter on a module that the arena has no layout
    for goes the way of ``TensorSync``, and a warning names the module.
    """

    name = "arena"
    in_thread = False
    merges = False

    def __init__(self, worker: dict[str, Any]) -> None:
        self._served = frozenset(worker["arena"])
        self._max_rank, self._uuid = int(worker["max_lora_rank"]), str(worker["uuid"])
        self._arena: Arena | None = None
        self._last: Filled | None = None
        self._other = TensorSync()
        self._warned: set[str] = set()

    def prepare(self, adapter: Adapter, layout: Layout) -> Filled | PlainAdapter:
        """Begin to copy the numbers into the half that doesn't serve; the worker waits for the end."""
        if other := sorted(set(layout.target_modules) - self._served):
            self._warn(other[0])
            return self._other.prepare(adapter, layout)
        arena, ranks = self._arena, [self._max_rank] * len(layout.parts)
        if arena is None or not arena.fits(layout, ranks):
            arena = Arena(adapter, layout, ranks, self._uuid, scaled=True)
        return filled(arena, self._last, adapter, layout)

    def holds(self, prepared: Filled | PlainAdapter) -> bool:
        """Compare the two halves."""
        if isinstance(prepared, PlainAdapter):
            return self._other.holds(prepared)
        return prepared.equals(self._last)

    async def push(self, engine: AsyncLLM, name: str, int_id: int, prepared: Filled | PlainAdapter) -> str:
        """Tell the workers to copy, and see that every one did.

        Raises AdapterError for numbers that aren't finite, which the workers find before they copy.
        """
        try:
            if isinstance(prepared, PlainAdapter):
                path = await self._other.push(engine, name, int_id, prepared)
                self._forget()
                return path
            copied = await self._commit(engine, int_id, prepared)
        except Exception:
            # A worker that failed still has the old adapter; others may have gone on to the new.
            await self.restore(engine, name, int_id)
            raise
        if not copied:
            raise prepared.unservable()
        self._other.unloaded()
        if self._arena is not prepared.arena:
            self._forget()
            self._arena = prepared.arena
        self._last = prepared.served()
        return IN_MEMORY

    async def restore(self, engine: AsyncLLM, name: str, int_id: int) -> None:
        """Copy the half that served last once more, by way of vLLM's own loading."""
        if self._last is None:
            await self._other.restore(engine, name, int_id)
        else:
            await self._commit(engine, int_id, self._last, again=True)

    def unloaded(self) -> None:
        """Forget which half served."""
        self._last = None
        self._other.unloaded()

    def close(self) -> None:
        """Give the arena back."""
        self._forget()
        self._other.close()

    async def _commit(self, engine: AsyncLLM, int_id: int, filled: Filled, again: bool = False) -> bool:
        arena = filled.arena
        if not arena.open:
            config = plain_config(self._max_rank, arena.leaves)
            try:
                await engine.collective_rpc(
                    "rollproof_open", args=(arena.key, config, arena.handle, arena.places)
                )
            finally:
                arena.shared.forget_file()
            arena.open = True
        found = await engine.collective_rpc("rollproof_commit", args=(arena.key, int_id, filled.half, again))
        return all(found)

    def _forget(self) -> None:
        self._arena = self._last = None

    def _warn(self, leaf: str) -> None:
        if leaf not in self._warned:
            self._warned.add(leaf)
            _log.warning(
                "the arena has no layout for %s on this engine; updates of adapters on it are sent as with "
                "sync=tensors, which is slower",
                leaf,
            )
