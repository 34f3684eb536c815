"""The kernels of ``copying.py``, apart from it because only Triton can read them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def copy_chunks(table, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Each program copies one row of the table: (to, from, words of 8 bytes)."""
    row = table + 3 * tl.program_id(0)
    # Without these hints the compiler moves one word at a time.
    to = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(tl.int64))
    of = tl.multiple_of(tl.load(row + 1), 16).to(tl.pointer_type(tl.int64))
    words = tl.multiple_of(tl.load(row + 2), 2)
    place = tl.arange(0, WORDS)
    inside = place < words
    tl.store(to + place, tl.load(of + place, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def fill_chunks(  # type: ignore[no-untyped-def]
    table,
    scales,
    sources,
    infinite,
    OF: tl.constexpr,  # noqa: N803
    TO: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    STRIDED: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    """Each program casts and then scales one row of the table, and says where a result isn't finite.

    A row: (tensor, to, first element, elements of the tensor, its columns, elements between rows at ``to``).
    """
    row = table + 6 * tl.program_id(0)
    tensor = tl.load(row)
    to, of = tl.load(row + 1), tl.load(sources + tensor)
    first, count = tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        to, of = tl.multiple_of(to, 16), tl.multiple_of(of, 16)
        first, count = tl.multiple_of(first, 8), tl.multiple_of(count, 8)
    # Counted from the chunk's first element: numbers of 32 bits take half the registers.
    place = tl.arange(0, ELEMENTS)
    inside = place < (count - first).to(tl.int32)
    found = tl.load(of.to(tl.pointer_type(OF)) + first + place, mask=inside, other=0.0).to(TO)
    scaled = (found.to(tl.float32) * tl.load(scales + tensor)).to(TO)
    if STRIDED:
        columns, stride = tl.load(row + 4), tl.load(row + 5)
        begin = (first % columns).to(tl.int32)
        row_of, column_of = (begin + place) // columns.to(tl.int32), (begin + place) % columns.to(tl.int32)
        into = first // columns * stride + row_of * stride + column_of
    else:
        into = first + place
    tl.store(to.to(tl.pointer_type(TO)) + into, scaled, mask=inside)
    finite = tl.abs(scaled.to(tl.float32)) < float("inf")  # not so for a NaN either
    # A store of its own for each: to find out whether there is one at all, threads would wait for each other.
    tl.store(infinite + tl.zeros_like(place), 1, mask=inside & (finite == 0))
