"""Many tensors copied at once: by one kernel on a GPU, since a copy each takes longer to start than to run.

Nothing here knows what the tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

_WORDS = 2048
"""Words of 8 bytes that one program of the kernel copies."""

_ELEMENTS, _WARPS = 1024, 2
"""Elements that one program of the other kernel casts, and its warps."""

_ALIGNED = 16
"""Bytes that a thread moves at once: addresses and sizes are multiples of it, or the kernel isn't used."""


_dtype = attrgetter("dtype")


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
            kernels().copy_chunks[(len(self._table),)](self._table, WORDS=_WORDS, num_warps=8)
        elif self._to:
            torch._foreach_copy_(self._to, self._of)


class Fill:
    """Casts tensors into others of the same shape and then scales them, again and again, in the current
    stream.

    ``into`` have one dtype and rows of elements side by side, and stay where they are; each has its scale.
    ``infinite``, an int32 [1] on their device, is 1 after a copy that wrote a number which isn't finite,
    and else 0.
    """

    def __init__(self, into: Sequence[torch.Tensor], scales: Sequence[float], infinite: torch.Tensor) -> None:
        self._into, self._scales, self._infinite = list(into), list(scales), infinite
        self._table = self._factors = None
        self._addresses: list[int] = []
        if into and into[0].is_cuda and kernels() is not None:
            device = into[0].device
            self._table = _in_chunks(
                [(to.data_ptr(), to.numel(), to.shape[1], to.stride(0)) for to in into]
            ).to(device)
            self._factors = torch.tensor(scales, dtype=torch.float32, device=device)
            self._strided = not all(to.is_contiguous() for to in into)
            self._aligned = not any(to.data_ptr() % _ALIGNED or to.numel() % 8 for to in into)

    @torch.no_grad()
    def __call__(self, sources: Sequence[torch.Tensor]) -> None:
        """Fill all. On a GPU it returns once that is queued."""
        if self._table is not None and self._suits(sources):
            self._launch(sources)
            return
        torch._foreach_copy_(self._into, list(sources))
        for to, scale in zip(self._into, self._scales, strict=True):
            if scale != 1:
                to.mul_(scale)  # torch._foreach_mul_ would round the scale to the tensor's dtype first
        # One number that isn't finite makes the sum so.
        sums = torch.stack([to.sum(dtype=torch.float32) for to in self._into])
        finite = bool(sums.isfinite().all()) or all(bool(to.isfinite().all()) for to in self._into)
        self._infinite.fill_(not finite)

    def _suits(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether the kernel can read them: on this GPU, of one dtype, each in one piece."""
        return (
            set(map(torch.Tensor.get_device, sources)) == {self._into[0].get_device()}
            and len(set(map(_dtype, sources))) == 1
            and all(map(torch.Tensor.is_contiguous, sources))
        )

    def _launch(self, sources: Sequence[torch.Tensor]) -> None:
        assert self._table is not None
        addresses = list(map(torch.Tensor.data_ptr, sources))
        if addresses != self._addresses:
            self._sources = torch.tensor(addresses, dtype=torch.int64).to(self._table.device)
            self._addresses = addresses
        self._infinite.zero_()
        kernels().fill_chunks[(len(self._table),)](
            self._table,
            self._factors,
            self._sources,
            self._infinite,
            OF=_triton_type(sources[0].dtype),
            TO=_triton_type(self._into[0].dtype),
            ALIGNED=self._aligned and not any(address % _ALIGNED for address in addresses),
            STRIDED=self._strided,
            ELEMENTS=_ELEMENTS,
            num_warps=_WARPS,
        )


def _in_chunks(tensors: Sequence[tuple[int, int, int, int]]) -> torch.Tensor:
    """Rows (tensor, address, first element, elements, columns, stride) for ``_ELEMENTS`` at a time."""
    each = torch.tensor(tensors, dtype=torch.int64)
    which, first = _chunks(each[:, 1], _ELEMENTS)
    address, elements, columns, stride = each[which].unbind(1)
    return torch.stack([which, address, first, elements, columns, stride], 1)


def _chunks(sizes: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Things of these sizes, at most so much at a time: which it is, and where in it a chunk begins."""
    counts = (sizes + most - 1) // most
    which = torch.arange(len(sizes)).repeat_interleave(counts)
    return which, (torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]) * most


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _fusible(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    tensors = [tensor for pair in pairs for tensor in pair]
    return (
        bool(tensors)
        and len({tensor.device for tensor in tensors}) == 1
        and tensors[0].is_cuda
        and all(tensor.is_contiguous() for tensor in tensors)
        and not any(t.data_ptr() % _ALIGNED or t.numel() * t.element_size() % _ALIGNED for t in tensors)
        and kernels() is not None
    )


def _table(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[chunks, 3], int64: the address to copy to, the one to copy from, and how many words."""
    each = torch.tensor(
        [(to.data_ptr(), of.data_ptr(), to.numel() * to.element_size() // 8) for to, of in pairs]
    )
    which, first = _chunks(each[:, 2], _WORDS)
    to, of, words = each[which].unbind(1)
    rows = torch.stack([to + 8 * first, of + 8 * first, (words - first).clamp(max=_WORDS)], 1)
    return rows.to(pairs[0][0].device)


@cache
def kernels(name: str = "copying_kernel") -> Any:
    """A module of this package with kernels; None where there is no Triton to compile them."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    return import_module(f".{name}", __package__)
