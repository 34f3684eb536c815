"""The kernel of ``folding.py``, apart from it because only Triton can read it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def fold_tiles(  # type: ignore[no-untyped-def]
    owners,
    table,
    scales,
    memory,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
):
    """Each program writes one tile of a weight: W0 plus scale * B @ A in float32, rounded once.

    A row of the table: (to, from, first element of A and of B in ``memory``, rows, columns, rank, first
    program). All but the rows and the program are multiples of what a thread moves at once.
    """
    owner = tl.load(owners + tl.program_id(0))
    row = table + 8 * owner
    to = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(memory.dtype.element_ty))
    of = tl.multiple_of(tl.load(row + 1), 16).to(tl.pointer_type(memory.dtype.element_ty))
    a = memory + tl.multiple_of(tl.load(row + 2), 8)
    b = memory + tl.multiple_of(tl.load(row + 3), 8)
    height, width = tl.load(row + 4), tl.multiple_of(tl.load(row + 5), 8)
    rank = tl.multiple_of(tl.load(row + 6), 8)
    tile = tl.program_id(0) - tl.load(row + 7)
    across = (width + COLUMNS - 1) // COLUMNS
    ys = tile // across * ROWS + tl.arange(0, ROWS)
    xs = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    ks = tl.arange(0, RANK)
    place = ys[:, None] * width + xs[None, :]
    inside = (ys[:, None] < height) & (xs[None, :] < width)
    found = tl.load(of + place, mask=inside, other=0.0, eviction_policy="evict_first")
    tall = tl.load(
        b + ys[:, None] * rank + ks[None, :], mask=(ys[:, None] < height) & (ks[None, :] < rank), other=0.0
    )
    wide = tl.load(
        a + ks[:, None] * width + xs[None, :], mask=(ks[:, None] < rank) & (xs[None, :] < width), other=0.0
    )
    whole = found.to(tl.float32) + tl.load(scales + owner) * tl.dot(tall, wide)
    tl.store(to + place, whole.to(memory.dtype.element_ty), mask=inside)
