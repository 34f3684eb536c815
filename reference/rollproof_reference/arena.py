"""Two halves of memory that trainer and engine both map: one serves while the other is filled.

Nothing here knows an engine, or what it does with a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from .copying import Fill
from .memory import Shared, local_device, mapped
from .plain import infinite

if TYPE_CHECKING:
    from rollproof.protocol import Adapter

    from .check import AdapterError, Layout

_ALIGNED = 64
"""Each tensor begins at a multiple of so many elements: kernels move many bytes at once from there. So
many at a half's end say whether a number in it isn't finite."""

Place = tuple[str, int, int, int]
"""A tensor in half of an arena: PEFT's name, its first element, its rows and columns."""


def views(half: torch.Tensor, places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """The tensors in half of an arena, by PEFT's names."""
    return {
        name: half[first : first + rows * columns].view(rows, columns)
        for name, first, rows, columns in places
    }


def _infinite(half: torch.Tensor) -> torch.Tensor:
    """[1], int32: 1 where a number in this half isn't finite."""
    return half[-_ALIGNED:].view(torch.int32)[:1]


class Arena:
    """Room for two adapters on the same modules: ``memory`` is [2, elements], one half for each.

    A is [rank, in] and B [out, rank], with the rank that ``ranks`` has for each module, zero beyond the
    adapter's own; a magnitude is [1, out]. With ``scaled`` each module's scale is in its B.
    """

    def __init__(
        self, adapter: Adapter, layout: Layout, ranks: Sequence[int], uuid: str, *, scaled: bool
    ) -> None:
        tensors, parts = adapter.tensors, layout.parts
        sizes = [(part.a, rank, tensors[part.a].shape[1]) for part, rank in zip(parts, ranks, strict=True)]
        sizes += [(part.b, tensors[part.b].shape[0], rank) for part, rank in zip(parts, ranks, strict=True)]
        sizes += [(name, 1, len(tensors[name])) for part in parts if (name := part.magnitude) is not None]
        self.places: list[Place] = []
        end = 0
        for name, rows, columns in sizes:
            self.places.append((name, end, rows, columns))
            end += -(-rows * columns // _ALIGNED) * _ALIGNED
        shape, device = (2, end + _ALIGNED), local_device(uuid)
        self._filled = None
        if device is None:
            self.shared = Shared.on_host(shape, layout.dtype)
        else:
            self.shared = Shared.on_gpu(shape, layout.dtype, device)
            self._filled = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        self.key = uuid4().hex
        self.leaves = layout.target_modules
        self.open = False
        self._scaled = scaled
        self._layout, self._form = layout, _form(layout, ranks)
        self._filling: list[_Filling | None] = [None, None]

    @property
    def memory(self) -> torch.Tensor:
        """Both halves."""
        return self.shared.tensor

    @property
    def handle(self) -> dict[str, Any]:
        """What ``Received`` takes: plain values."""
        if self._filled is None:
            return self.shared.handle
        return self.shared.handle | {"filled": self._filled.ipc_handle()}  # type: ignore[no-untyped-call]

    def fits(self, layout: Layout, ranks: Sequence[int]) -> bool:
        """Whether adapters of this layout have their place in it."""
        return layout is self._layout or self._form == _form(layout, ranks)

    def fill(self, half: int, adapter: Adapter, layout: Layout) -> None:
        """Copy an adapter into one half: cast first and scaled then, as vLLM does it when it loads a folder.

        On a GPU it returns once the copy is queued in the current stream.
        """
        filling = self._filling[half]
        if filling is None or filling.layout is not layout:
            self.memory[half].zero_()  # a rank of its own leaves other parts untouched
            filling = self._filling[half] = _Filling.of(self, half, layout, self._scaled)
        if self._filled is None:
            filling.fill(filling.sources(adapter))
            return
        stream = torch.cuda.current_stream(self.memory.device)
        stream.synchronize()  # the engine waits for the copy, and for all that is queued before it
        filling.fill(filling.sources(adapter))
        self._filled.record(stream)

    def unservable(self, half: int, adapter: Adapter) -> AdapterError:
        """What to say of numbers in this adapter, which was copied to the half, that aren't finite there."""
        filling = self._filling[half]
        assert filling is not None
        return infinite(filling.names, filling.sources(adapter), filling.scales, filling.layout.dtype)


def _form(layout: Layout, ranks: Sequence[int]) -> list[tuple[str, int, str | None]]:
    return [(part.a, rank, part.magnitude) for part, rank in zip(layout.parts, ranks, strict=True)]


@dataclass(frozen=True)
class _Filling:
    """How an adapter of one layout goes into a half: tensors by name, in the order that ``fill`` takes."""

    layout: Layout
    names: list[str]
    scales: list[float]
    fill: Fill

    def sources(self, adapter: Adapter) -> list[torch.Tensor]:
        """An adapter's tensors in that order."""
        return list(map(adapter.tensors.__getitem__, self.names))

    @classmethod
    def of(cls, arena: Arena, half: int, layout: Layout, scaled: bool) -> _Filling:
        whole = views(arena.memory[half], arena.places)
        placed = [(part.a, whole[part.a][: part.rank], 1.0) for part in layout.parts]
        placed += [
            (part.b, whole[part.b][:, : part.rank], part.scale if scaled else 1.0) for part in layout.parts
        ]
        placed += [(name, whole[name], 1.0) for part in layout.parts if (name := part.magnitude) is not None]
        names, scales = [name for name, _, _ in placed], [scale for _, _, scale in placed]
        fill = Fill([into for _, into, _ in placed], scales, _infinite(arena.memory[half]))
        return cls(layout, names, scales, fill)


@dataclass(frozen=True)
class Filled:
    """A half of an arena, filled with an adapter, which is forgotten once it is served (``served``)."""

    arena: Arena
    half: int
    layout: Layout
    adapter: Adapter | None

    @property
    def rank(self) -> int:
        """The highest that a module has."""
        return self.layout.rank

    @property
    def memory(self) -> torch.Tensor:
        """The half."""
        return self.arena.memory[self.half]

    @property
    def finite(self) -> bool:
        """Whether all numbers in it are. Waits for the copy to end."""
        return not _infinite(self.memory).item()

    def unservable(self) -> AdapterError:
        """What to say of an adapter with numbers that aren't finite."""
        assert self.adapter is not None
        return self.arena.unservable(self.half, self.adapter)

    def served(self) -> Filled:
        """It without the adapter's own tensors."""
        return replace(self, adapter=None)

    def equals(self, other: Filled | None) -> bool:
        """Whether the other half of the same arena has the same numbers."""
        return other is not None and other.arena is self.arena and other.memory.equal(self.memory)


class Received:
    """An arena as the engine's worker sees it: ``memory`` are both halves, on the worker's device.

    ``filled`` is what the sender records once it has written a half.
    """

    def __init__(
        self, shared: torch.Tensor, device: torch.device, filled: torch.cuda.Event | None = None
    ) -> None:
        self._shared, self._filled = shared, filled
        # Memory of the host is copied to the device whole, and to its places from there.
        self.memory = shared if shared.device.type == device.type else torch.empty_like(shared, device=device)
        self.bytes = shared[0].numel() * shared.element_size()
        self._used = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, handle: dict[str, Any], device: torch.device) -> Received:
        """Map what an arena's ``handle`` names."""
        filled = None
        if "filled" in handle:
            filled = torch.cuda.Event.from_ipc_handle(  # type: ignore[no-untyped-call]
                device, handle["filled"]
            )
        return cls(mapped(handle), device, filled)

    def receive(self, half: int) -> None:
        """Have what the sender wrote to a half in ``memory``."""
        if self._filled is not None:
            self._filled.synchronize()
        if self._used is not None:
            # The sender writes to a half again after the update that follows: by then it was used.
            self._used.synchronize()
        if self.memory is not self._shared:
            self.memory[half].copy_(self._shared[half])

    def finite(self, half: int) -> bool:
        """Whether all numbers in a half that was received are."""
        return not _infinite(self._shared[half]).item()

    def used(self) -> None:
        """Note that whatever reads ``memory`` for this update is queued."""
        if self._used is not None:
            self._used.record()


def filled(arena: Arena, serving: Filled | None, adapter: Adapter, layout: Layout) -> Filled:
    """Fill the half that doesn't serve."""
    half = 1 - serving.half if serving is not None and serving.arena is arena else 0
    arena.fill(half, adapter, layout)
    return Filled(arena, half, layout, adapter)
