"""The kernel of ``copying.py``, apart from it because only Triton can read it."""

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
