"""Folding an adapter into weights: W = W0 + s * B @ A from an unchanged copy W0, rounded once.

Every fold starts from W0, so nothing is left of any adapter before, and nothing drifts. Nothing here
knows an engine, or where the weights and the adapter come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .copying import kernels

if TYPE_CHECKING:
    from .kept import Kept

SCRATCH = 1 << 22
"""Elements of a weight that are computed at once where float32 needs memory of its own."""

ROWS, COLUMNS, TILES, STAGES, WARPS = 16, 128, 16, 3, 4
"""A program of the kernel computes so many tiles side by side, in so many stages, by so many warps:
the fastest of those tried on an H200 (benchmarks/results/updates/DIARY.md)."""

HIGHEST_RANK = 128
"""The highest rank that the kernel takes."""

_KERNELS = "folding_kernel"

_ALIGNED = 16
"""Bytes that a thread of the kernel moves at once."""


@dataclass(frozen=True)
class Product:
    """What one weight becomes: ``weight`` [out, in] plus a scale times ``b`` [out, rank] @ ``a`` [rank, in].

    With a ``magnitude`` [out] each row has this length then (DoRA). All in one dtype, on one device.
    """

    name: str
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rank, columns = self.a.shape
        if self.weight.shape != (len(self.b), columns) or self.b.shape[1] != rank:
            raise ValueError(
                f"{self.name!r} is {list(self.weight.shape)} in the engine: A {list(self.a.shape)} and "
                f"B {list(self.b.shape)} don't go with it"
            )
        if self.a.dtype != self.weight.dtype:
            raise ValueError(f"{self.name!r} is {self.weight.dtype} in the engine, and A {self.a.dtype}")


def fold(
    into: torch.Tensor,
    of: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    magnitude: torch.Tensor | None = None,
) -> None:
    """Write ``of`` [out, in] + ``scale`` * ``b`` @ ``a`` to ``into``, which may be ``of`` itself.

    Computed in float32 and rounded once. With a ``magnitude`` [out], each row is brought to that length.
    """
    if into.dtype == torch.float32 and magnitude is None:
        torch.addmm(of, b, a, alpha=scale, out=into)  # in fewer bits it rounds more than once, on a GPU too
    else:
        for rows, whole in _wide(of, a, b, scale, magnitude):
            into[rows] = whole


def is_finite(
    of: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, m: torch.Tensor | None
) -> bool:
    """Whether ``fold`` would write finite numbers alone."""
    return all(bool(whole.to(of.dtype).isfinite().all()) for _, whole in _wide(of, a, b, scale, m))


def _wide(
    of: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, magnitude: torch.Tensor | None
) -> Iterable[tuple[slice, torch.Tensor]]:
    """The result in float32, some rows at a time."""
    step = max(1, SCRATCH // of.shape[1])
    wide_a = a.float()
    for first in range(0, len(of), step):
        rows = slice(first, first + step)
        whole = torch.addmm(of[rows].float(), b[rows].float(), wide_a, alpha=scale)
        if magnitude is not None:
            whole *= (magnitude[rows].float() / torch.linalg.vector_norm(whole, dim=1))[:, None]
        yield rows, whole


class Folds:
    """Products that are folded again and again, with other numbers in A and B and other scales.

    ``halves`` are two lists of the same products, whose A, B and magnitudes lie at the same places of
    ``memory[0]`` and ``memory[1]``.
    """

    def __init__(self, halves: Sequence[Sequence[Product]], memory: torch.Tensor) -> None:
        self._halves, self._memory = halves, memory
        self.weights = {product.name: product.weight for product in halves[0]}
        self._fusible = [_is_fusible(product) for product in halves[0]]
        self._table: _Table | None = None

    def check(self, half: int, scales: Sequence[float], top: float, kept: Kept) -> None:
        """Raise ValueError where a result wouldn't be finite. ``top`` is the largest magnitude in the half.

        Only what could overflow by that is computed.
        """
        for product, scale in zip(self._halves[half], scales, strict=True):
            bound = abs(scale) * len(product.a) * top**2 + kept.peak(product.name)
            if bound < torch.finfo(product.weight.dtype).max and product.magnitude is None:
                continue
            of = kept.copy_of(product.name).to(product.weight.device)
            if not is_finite(of, product.a, product.b, scale, product.magnitude):
                raise ValueError(
                    f"folded into {product.name!r} this adapter gives numbers that aren't finite in "
                    f"{product.weight.dtype}"
                )

    def __call__(self, half: int, scales: Sequence[float], kept: Kept) -> None:
        """Write all weights. On a GPU it returns once that is queued in the current stream."""
        products = self._halves[half]
        if kept.host:
            kept.put_back(self.weights)
        sources = [p.weight if kept.host else kept.copy_of(p.name) for p in products]
        fused = [index for index, fusible in enumerate(self._fusible) if fusible]
        if fused:
            of = [sources[index] for index in fused]
            if self._table is None or not self._table.reads(of):
                self._table = _Table([self._halves[0][index] for index in fused], of, self._memory[0])
            self._table(self._memory[half], [scales[index] for index in fused])
        for product, of_, scale, fusible in zip(products, sources, scales, self._fusible, strict=True):
            if not fusible:
                fold(product.weight, of_, product.a, product.b, scale, product.magnitude)


def _is_fusible(product: Product) -> bool:
    """Whether the kernel takes it."""
    weight, rank = product.weight, len(product.a)
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and product.magnitude is None
        and rank <= HIGHEST_RANK
        and not any(
            not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNED or tensor.shape[1] % 8
            for tensor in (weight, product.a, product.b)
        )
        and kernels(_KERNELS) is not None
    )


class _Table:
    """What the kernel reads: a row for each product, and for each program the row that it works on."""

    def __init__(
        self, products: Sequence[Product], sources: Sequence[torch.Tensor], memory: torch.Tensor
    ) -> None:
        self._sources = [of.data_ptr() for of in sources]
        self._scales: list[float] = []
        size, start = memory.element_size(), memory.data_ptr()
        rows, tiles = [], list[int]()
        for product, of in zip(products, sources, strict=True):
            height, width = product.weight.shape
            rows.append(
                (
                    product.weight.data_ptr(),
                    of.data_ptr(),
                    (product.a.data_ptr() - start) // size,
                    (product.b.data_ptr() - start) // size,
                    height,
                    width,
                    len(product.a),
                    sum(tiles),
                )
            )
            tiles.append(-(-height // ROWS) * -(-width // (COLUMNS * TILES)))
        device = memory.device
        self._rows = torch.tensor(rows, dtype=torch.int64).to(device)
        self._owners = torch.repeat_interleave(torch.tensor(tiles)).to(device, torch.int32)
        # What tensor cores multiply at least.
        self._rank = max(16, 1 << (max(len(product.a) for product in products) - 1).bit_length())

    def reads(self, sources: Sequence[torch.Tensor]) -> bool:
        return self._sources == [of.data_ptr() for of in sources]

    def __call__(self, memory: torch.Tensor, scales: Sequence[float]) -> None:
        if self._scales != list(scales):
            self._scales = list(scales)
            self._factors = torch.tensor(scales, dtype=torch.float32).to(memory.device)
        kernels(_KERNELS).fold_tiles[(len(self._owners),)](
            self._owners,
            self._rows,
            self._factors,
            memory,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            TILES=TILES,
            STAGES=STAGES,
            RANK=self._rank,
            num_warps=WARPS,
        )
