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
    TILES: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
):
    """Each program writes tiles of a weight, side by side: W0 plus scale * B @ A in float32, rounded once.

    A row of the table: (to, from, first element of A and of B in ``memory``, rows, columns, rank, first
    program). All but the rows and the program are multiples of what a thread moves at once.
    """
    owner = tl.load(owners + tl.program_id(0))
    row = table + 8 * owner
    to = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(memory.dtype.element_ty))
    of = tl.multiple_of(tl.load(row + 1), 16).to(tl.pointer_type(memory.dtype.element_ty))
    a = memory + tl.multiple_of(tl.load(row + 2), 8)
    b = memory + tl.multiple_of(tl.load(row + 3), 8)
    height, width = tl.load(row + 4).to(tl.int32), tl.multiple_of(tl.load(row + 5).to(tl.int32), 8)
    rank = tl.multiple_of(tl.load(row + 6).to(tl.int32), 8)
    mine = tl.program_id(0) - tl.load(row + 7).to(tl.int32)
    across = (width + COLUMNS * TILES - 1) // (COLUMNS * TILES)
    ys = mine // across * ROWS + tl.arange(0, ROWS)
    ks = tl.arange(0, RANK)
    scale = tl.load(scales + owner)
    tall = tl.load(
        b + ys[:, None] * rank + ks[None, :], mask=(ys[:, None] < height) & (ks[None, :] < rank), other=0.0
    )
    begin = mine % across * COLUMNS * TILES
    end = tl.minimum(begin + COLUMNS * TILES, width)
    for first in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        xs = first + tl.arange(0, COLUMNS)
        place = ys.to(tl.int64)[:, None] * width + xs[None, :]
        inside = (ys[:, None] < height) & (xs[None, :] < width)
        found = tl.load(of + place, mask=inside, other=0.0)
        wide = tl.load(
            a + ks[:, None] * width + xs[None, :],
            mask=(ks[:, None] < rank) & (xs[None, :] < width),
            other=0.0,
        )
        whole = found.to(tl.float32) + scale * tl.dot(tall, wide)
        tl.store(to + place, whole.to(memory.dtype.element_ty), mask=inside)
