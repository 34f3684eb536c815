"""Many tensors copied at once: by one kernel on a GPU, since a copy each takes longer to start than to run.

Nothing here knows what the tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_WORDS = 2048
"""Words of 8 bytes that one program of the kernel copies."""

_ALIGNED = 16
"""Bytes that a thread moves at once: addresses and sizes are multiples of it, or the kernel isn't used."""


class Copies:
    """A list of copies (destination, source) that is made again and again, in the current stream.

    All are contiguous and of one size and dtype pair by pair, and stay where they are.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for to, of in pairs:
            if to.shape != of.shape or to.dtype != of.dtype:
                raise ValueError(
                    f"a {of.dtype} tensor of {list(of.shape)} can't be copied into a {to.dtype} one of "
                    f"{list(to.shape)}"
                )
        self._to = [to for to, _ in pairs]
        self._of = [of for _, of in pairs]
        self._table = _table(pairs) if _fusible(pairs) else None

    def __call__(self) -> None:
        """Make them. On a GPU it returns once they are queued."""
        if self._table is not None:
            kernel = _kernel()
            kernel[(len(self._table),)](self._table, WORDS=_WORDS, num_warps=8)
        elif self._to:
            torch._foreach_copy_(self._to, self._of)


def _fusible(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    tensors = [tensor for pair in pairs for tensor in pair]
    return (
        bool(tensors)
        and len({tensor.device for tensor in tensors}) == 1
        and tensors[0].is_cuda
        and all(tensor.is_contiguous() for tensor in tensors)
        and not any(t.data_ptr() % _ALIGNED or t.numel() * t.element_size() % _ALIGNED for t in tensors)
        and _kernel() is not None
    )


def _table(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[chunks, 3], int64: the address to copy to, the one to copy from, and how many words."""
    rows = []
    for to, of in pairs:
        words = to.numel() * to.element_size() // 8
        for first in range(0, words, _WORDS):
            here = min(_WORDS, words - first)
            rows.append((to.data_ptr() + 8 * first, of.data_ptr() + 8 * first, here))
    return torch.tensor(rows, dtype=torch.int64).to(pairs[0][0].device)


@cache
def _kernel() -> Any:
    """The kernel; None where there is no Triton to compile it."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from .copying_kernel import copy_chunks

    return copy_chunks
