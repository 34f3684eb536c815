"""Sync into the weights themselves: W = W0 + s * B @ A, on an engine that needs no LoRA for it.

A and B travel as with ``ArenaSync``; the engine's worker keeps an unchanged copy of every weight that the
adapter is on, and writes the sum over the weight between two steps. Requests then run as fast as those of
the base model.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ..arena import Arena, Filled, filled
from ..check import AdapterError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import Adapter

    from ..check import Layout

_log = logging.getLogger(__name__)

PRISTINE = ("device", "host")
"""Where the unchanged copies can be kept."""

_ALIGNED = 8
"""Ranks are rounded up to a multiple of it: from there on kernels move many bytes at once."""


class FoldSync:
    """Keeps one arena for an adapter's modules and ranks; other ones get a new arena.

    ``worker`` is what ``rollproof_describe`` gives, ``pristine`` where the unchanged copies are kept.
    """

    name = "fold"
    in_thread = False
    merges = True

    def __init__(self, worker: dict[str, Any], pristine: str = "device") -> None:
        self._uuid, self._pristine = str(worker["uuid"]), pristine
        self._arena: Arena | None = None
        self._last: Filled | None = None

    def prepare(self, adapter: Adapter, layout: Layout) -> Filled:
        """Copy the numbers into the half that wasn't folded in last."""
        arena, ranks = self._arena, [-(-part.rank // _ALIGNED) * _ALIGNED for part in layout.parts]
        if arena is None or not arena.fits(layout, ranks):
            arena = Arena(adapter, layout, ranks, self._uuid, scaled=False)
        prepared = filled(arena, self._last, adapter, layout)
        if not prepared.finite:
            raise prepared.unservable()
        return prepared

    def holds(self, prepared: Filled) -> bool:
        """Compare the two halves, and the scales."""
        last = self._last
        return prepared.equals(last) and last is not None and _scales(prepared) == _scales(last)

    async def push(self, engine: AsyncLLM, name: str, int_id: int, prepared: Filled) -> str:
        """Tell the workers to fold."""
        await self._open(engine, prepared)
        try:
            await self._fold(engine, prepared)
        except Exception:
            # What was refused before the first byte was written left all as it was; else this mends it.
            await self.restore(engine, name, int_id)
            raise
        self._arena, self._last = prepared.arena, prepared.served()
        return ""

    async def restore(self, engine: AsyncLLM, name: str, int_id: int) -> None:
        """Fold once more what was folded in last; without any, make the weights the base model's."""
        if self._last is None:
            await engine.collective_rpc("rollproof_unfold")
        else:
            await self._fold(engine, self._last)

    def unloaded(self) -> None:
        """Forget which half was folded in. The worker frees its copies, so room for them is asked again."""
        self._arena = self._last = None

    def close(self) -> None:
        """Give the arena back."""
        self._arena = self._last = None

    async def _open(self, engine: AsyncLLM, prepared: Filled) -> None:
        """Have the workers map an arena, and see that there is room for what they will keep."""
        arena = prepared.arena
        if arena.open:
            return
        parts = [[part.a, part.b, part.magnitude] for part in prepared.layout.parts]
        try:
            found = await engine.collective_rpc(
                "rollproof_open_folds",
                args=(arena.key, arena.handle, arena.places, parts, self._pristine == "host"),
            )
        finally:
            arena.shared.forget_file()
        cost, room = found[0]["cost"], found[0]["room"]
        if missing := found[0]["missing"]:
            raise AdapterError(
                f"the engine has no weight of its own for {missing[0]!r} (it may be packed with others, as "
                "experts are); use sync=arena, tensors or disk for it"
            )
        told = f"{cost / 1e9:.3g} GB for unchanged copies of the weights that the adapter is on"
        if cost > room:
            raise MemoryError(
                f"sync=fold takes {told}, and {room / 1e9:.3g} GB are free; use pristine=host, a lower "
                "gpu_memory_utilization, or sync=arena"
            )
        _log.info("sync=fold takes %s; %.3g GB are free", told, room / 1e9)
        arena.open = True

    async def _fold(self, engine: AsyncLLM, prepared: Filled) -> None:
        top = torch.linalg.vector_norm(prepared.memory, torch.inf).item()
        await engine.collective_rpc(
            "rollproof_fold", args=(prepared.arena.key, prepared.half, _scales(prepared), top)
        )


def _scales(filled: Filled) -> list[float]:
    return [part.scale for part in filled.layout.parts]
