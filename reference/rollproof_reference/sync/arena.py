"""Sync at the speed of memory: a buffer that trainer and engine both map, in the engine's own layout.

An update is one copy into the half of the buffer that the engine doesn't look at, and a word to the
engine's worker, which copies that half into the memory that its kernels read, between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from ..copying import Fill
from ..memory import Shared, local_device
from ..plain import PlainAdapter, plain_adapter, plain_config
from .tensors import IN_MEMORY, TensorSync

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import Adapter

    from ..check import Layout, Part

_log = logging.getLogger(__name__)

_ALIGNED = 64
"""Each tensor begins at a multiple of so many elements: kernels move many bytes at once from there."""

Place = tuple[str, int, int, int]
"""A tensor in half of an arena: PEFT's name, its first element, its rows and columns."""


class Arena:
    """Room for two adapters on the same modules: ``memory`` is [2, elements], one half for each.

    A is [max_rank, in] and B [out, max_rank], as vLLM keeps them, zero beyond the adapter's own rank.
    """

    def __init__(
        self, parts: Sequence[Part], max_rank: int, shapes: dict[str, torch.Size], layout: Layout, uuid: str
    ) -> None:
        sizes = [(part.a, max_rank, shapes[part.a][1]) for part in parts]
        sizes += [(part.b, shapes[part.b][0], max_rank) for part in parts]
        self.places: list[Place] = []
        end = 0
        for name, rows, columns in sizes:
            self.places.append((name, end, rows, columns))
            end += -(-rows * columns // _ALIGNED) * _ALIGNED
        device = local_device(uuid)
        if device is None:
            self.shared = Shared.on_host((2, end), layout.dtype)
        else:
            self.shared = Shared.on_gpu((2, end), layout.dtype, device)
        self.key = uuid4().hex
        self.modules = [part.module for part in parts]
        self.max_rank = max_rank
        self.leaves = layout.target_modules
        self.open = False
        self._filling: list[_Filling | None] = [None, None]

    @property
    def memory(self) -> torch.Tensor:
        """Both halves."""
        return self.shared.tensor

    def fill(self, half: int, adapter: Adapter, layout: Layout) -> None:
        """Copy an adapter into one half. Raises AdapterError for numbers that can't be served.

        Cast first and scaled then, as vLLM does it when it loads a folder. When it returns, the
        copy has ended, and the adapter's tensors may be overwritten.
        """
        filling = self._filling[half]
        if filling is None or filling.layout is not layout:
            self.memory[half].zero_()  # a rank of its own leaves other parts untouched
            filling = self._filling[half] = _Filling.of(self, half, layout)
        if not filling.fill([adapter.tensors[name] for name in filling.names]):
            plain_adapter(adapter, layout)  # which names the tensor


@dataclass(frozen=True)
class _Filling:
    """How an adapter of one layout goes into a half: tensors by name, in the order that ``fill`` takes."""

    layout: Layout
    names: list[str]
    fill: Fill

    @classmethod
    def of(cls, arena: Arena, half: int, layout: Layout) -> _Filling:
        whole = {
            name: arena.memory[half, first : first + rows * columns].view(rows, columns)
            for name, first, rows, columns in arena.places
        }
        into = [whole[part.a][: part.rank] for part in layout.parts]
        into += [whole[part.b][:, : part.rank] for part in layout.parts]
        names = [part.a for part in layout.parts] + [part.b for part in layout.parts]
        return cls(layout, names, Fill(into, [1.0] * len(layout.parts) + [p.scale for p in layout.parts]))


@dataclass(frozen=True)
class Filled:
    """A half of an arena, filled with an adapter."""

    arena: Arena
    half: int
    layout: Layout

    @property
    def rank(self) -> int:
        """The highest that a module has."""
        return self.layout.rank


class ArenaSync:
    """Keeps one arena for the modules that the adapter is on; another set of modules gets a new one.

    ``worker`` is what ``rollproof_describe`` gives. An adapter on a module that the arena has no layout
    for goes the way of ``TensorSync``, and a warning names the module.
    """

    name = "arena"
    in_thread = False

    def __init__(self, worker: dict[str, Any]) -> None:
        self._served = frozenset(worker["arena"])
        self._max_rank, self._uuid = int(worker["max_lora_rank"]), str(worker["uuid"])
        self._arena: Arena | None = None
        self._last: Filled | None = None
        self._other = TensorSync()
        self._warned: set[str] = set()

    def prepare(self, adapter: Adapter, layout: Layout) -> Filled | PlainAdapter:
        """Copy the numbers into the half that doesn't serve."""
        if other := sorted(set(layout.target_modules) - self._served):
            self._warn(other[0])
            return self._other.prepare(adapter, layout)
        arena = self._arena
        if arena is None or arena.modules != [part.module for part in layout.parts]:
            shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
            arena = Arena(layout.parts, self._max_rank, shapes, layout, self._uuid)
        serving = self._last
        half = 1 - serving.half if serving is not None and serving.arena is arena else 0
        arena.fill(half, adapter, layout)
        return Filled(arena, half, layout)

    def holds(self, prepared: Filled | PlainAdapter) -> bool:
        """Compare the two halves."""
        if isinstance(prepared, PlainAdapter):
            return self._other.holds(prepared)
        last = self._last
        return (
            last is not None
            and last.arena is prepared.arena
            and last.arena.memory[last.half].equal(prepared.arena.memory[prepared.half])
        )

    async def push(self, engine: AsyncLLM, name: str, int_id: int, prepared: Filled | PlainAdapter) -> str:
        """Tell the workers to copy, and see that every one did."""
        try:
            if isinstance(prepared, PlainAdapter):
                path = await self._other.push(engine, name, int_id, prepared)
                self._forget()
                return path
            await self._commit(engine, int_id, prepared)
        except Exception:
            # A worker that failed still has the old adapter; others may have gone on to the new.
            await self.restore(engine, name, int_id)
            raise
        self._other.unloaded()
        if self._arena is not prepared.arena:
            self._forget()
            self._arena = prepared.arena
        self._last = prepared
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

    async def _commit(self, engine: AsyncLLM, int_id: int, filled: Filled, again: bool = False) -> None:
        arena = filled.arena
        if not arena.open:
            config = plain_config(arena.max_rank, arena.leaves)
            try:
                await engine.collective_rpc(
                    "rollproof_open", args=(arena.key, config, arena.shared.handle, arena.places)
                )
            finally:
                arena.shared.forget_file()
            arena.open = True
        await engine.collective_rpc("rollproof_commit", args=(arena.key, int_id, filled.half, again))

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
