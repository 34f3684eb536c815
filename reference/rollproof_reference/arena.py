"""Two halves of memory that trainer and engine both map: one serves while the other is filled.

Nothing here knows an engine, or what it does with a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import torch

from .copying import Fill
from .memory import Shared, local_device
from .plain import infinite

if TYPE_CHECKING:
    from rollproof.protocol import Adapter

    from .check import Layout

_ALIGNED = 64
"""Each tensor begins at a multiple of so many elements: kernels move many bytes at once from there."""

Place = tuple[str, int, int, int]
"""A tensor in half of an arena: PEFT's name, its first element, its rows and columns."""


def views(half: torch.Tensor, places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """The tensors in half of an arena, by PEFT's names."""
    return {
        name: half[first : first + rows * columns].view(rows, columns)
        for name, first, rows, columns in places
    }


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
        device = local_device(uuid)
        if device is None:
            self.shared = Shared.on_host((2, end), layout.dtype)
        else:
            self.shared = Shared.on_gpu((2, end), layout.dtype, device)
        self.key = uuid4().hex
        self.leaves = layout.target_modules
        self.open = False
        self._scaled = scaled
        self._form = _form(layout, ranks)
        self._filling: list[_Filling | None] = [None, None]

    @property
    def memory(self) -> torch.Tensor:
        """Both halves."""
        return self.shared.tensor

    def fits(self, layout: Layout, ranks: Sequence[int]) -> bool:
        """Whether adapters of this layout have their place in it."""
        return self._form == _form(layout, ranks)

    def fill(self, half: int, adapter: Adapter, layout: Layout) -> None:
        """Copy an adapter into one half. Raises AdapterError for numbers that can't be served.

        Cast first and scaled then, as vLLM does it when it loads a folder. When it returns, the
        copy has ended, and the adapter's tensors may be overwritten.
        """
        filling = self._filling[half]
        if filling is None or filling.layout is not layout:
            self.memory[half].zero_()  # a rank of its own leaves other parts untouched
            filling = self._filling[half] = _Filling.of(self, half, layout, self._scaled)
        sources = [adapter.tensors[name] for name in filling.names]
        if not filling.fill(sources):
            raise infinite(filling.names, sources, filling.scales, layout.dtype)


def _form(layout: Layout, ranks: Sequence[int]) -> list[tuple[str, int, str | None]]:
    return [(part.a, rank, part.magnitude) for part, rank in zip(layout.parts, ranks, strict=True)]


@dataclass(frozen=True)
class _Filling:
    """How an adapter of one layout goes into a half: tensors by name, in the order that ``fill`` takes."""

    layout: Layout
    names: list[str]
    scales: list[float]
    fill: Fill

    @classmethod
    def of(cls, arena: Arena, half: int, layout: Layout, scaled: bool) -> _Filling:
        whole = views(arena.memory[half], arena.places)
        placed = [(part.a, whole[part.a][: part.rank], 1.0) for part in layout.parts]
        placed += [
            (part.b, whole[part.b][:, : part.rank], part.scale if scaled else 1.0) for part in layout.parts
        ]
        placed += [(name, whole[name], 1.0) for part in layout.parts if (name := part.magnitude) is not None]
        names, scales = [name for name, _, _ in placed], [scale for _, _, scale in placed]
        return cls(layout, names, scales, Fill([into for _, into, _ in placed], scales))


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

    @property
    def memory(self) -> torch.Tensor:
        """The half."""
        return self.arena.memory[self.half]

    def equals(self, other: Filled | None) -> bool:
        """Whether the other half of the same arena has the same numbers."""
        return other is not None and other.arena is self.arena and other.memory.equal(self.memory)


class Received:
    """An arena as the engine's worker sees it: ``memory`` are both halves, on the worker's device."""

    def __init__(self, shared: torch.Tensor, device: torch.device) -> None:
        self._shared = shared
        # Memory of the host is copied to the device whole, and to its places from there.
        self.memory = shared if shared.device.type == device.type else torch.empty_like(shared, device=device)
        self.bytes = shared[0].numel() * shared.element_size()
        self._used = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def receive(self, half: int) -> None:
        """Have what the sender wrote to a half in ``memory``."""
        if self._used is not None:
            # The sender writes to a half again after the update that follows: by then it was used.
            self._used.synchronize()
        if self.memory is not self._shared:
            self.memory[half].copy_(self._shared[half])

    def used(self) -> None:
        """Note that whatever reads ``memory`` for this update is queued."""
        if self._used is not None:
            self._used.record()


def filled(arena: Arena, serving: Filled | None, adapter: Adapter, layout: Layout) -> Filled:
    """Fill the half that doesn't serve. Raises AdapterError for numbers that can't be served."""
    half = 1 - serving.half if serving is not None and serving.arena is arena else 0
    arena.fill(half, adapter, layout)
    return Filled(arena, half, layout)
