"""Unchanged copies of the weights that an adapter is folded into, and the way back to them.

Nothing here knows an engine.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import torch

if TYPE_CHECKING:
    from .arena import Received
    from .folding import Folds


class Kept:
    """Unchanged copies of the weights that something is folded into, by name.

    On the weights' device, or with ``host`` in pinned memory of the host.
    """

    def __init__(self, *, host: bool) -> None:
        self.host = host
        self._weights: dict[str, torch.Tensor] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._peaks: dict[str, float] = {}

    @property
    def names(self) -> frozenset[str]:
        """Of the weights that have a copy."""
        return frozenset(self._copies)

    def cost(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Bytes that copies of these weights take, beside those that are there."""
        lacking = [weight for name, weight in weights.items() if name not in self._copies]
        return sum(weight.numel() * weight.element_size() for weight in lacking)

    def room(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Bytes that are free where the copies go."""
        device = next(iter(weights.values())).device
        if self.host or device.type != "cuda":
            return int(psutil.virtual_memory().available)
        return int(torch.cuda.mem_get_info(device)[0])

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights that have no copy yet: all of them, or on an error none."""
        lacking = {name: weight for name, weight in weights.items() if name not in self._copies}
        if not lacking:
            return
        copies = {name: self._copy(weight) for name, weight in lacking.items()}
        peaks = torch.stack([torch.linalg.vector_norm(weight, torch.inf) for weight in lacking.values()])
        self._weights |= lacking
        self._copies |= copies
        self._peaks |= dict(zip(lacking, peaks.tolist(), strict=True))

    def copy_of(self, name: str) -> torch.Tensor:
        """What the weight was before anything was folded in."""
        return self._copies[name]

    def peak(self, name: str) -> float:
        """The largest magnitude in it."""
        return self._peaks[name]

    def put_back(self, names: Iterable[str]) -> None:
        """Make weights what they were, bit for bit. The copies stay."""
        for name in names:
            self._weights[name].copy_(self._copies[name], non_blocking=True)

    def drop(self, names: Iterable[str]) -> None:
        """Free copies of weights that are what they were."""
        done = list(names)
        if done and self._weights[done[0]].is_cuda:
            torch.cuda.synchronize()  # what puts them back is only queued
        for name in done:
            del self._weights[name], self._copies[name], self._peaks[name]

    def _copy(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.host or not weight.is_cuda:
            return weight.clone()
        return _pinned(weight).copy_(weight)


def _pinned(like: torch.Tensor) -> torch.Tensor:
    """Memory of the host that a GPU copies from at full speed, no larger than needed.

    torch's own pinned memory is rounded up to a power of two.
    """
    size = like.numel() * like.element_size()
    pages = mmap.mmap(-1, size)
    found = torch.frombuffer(pages, dtype=like.dtype).as_strided(like.shape, like.stride())
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cuda.cudaHostRegister(found.data_ptr(), size, 0))
    weakref.finalize(pages, cuda.cudaHostUnregister, found.data_ptr())
    return found


class Folder:
    """The arena whose adapter is folded in, one that was opened since, and the unchanged weights."""

    def __init__(self, *, host: bool) -> None:
        self.kept = Kept(host=host)
        self._arenas: dict[str, tuple[Received, Folds]] = {}
        self._folded = ""

    def open(self, key: str, arena: Received, folds: Folds) -> None:
        """Take one more arena. One that was opened before it and never folded in was refused."""
        self._arenas = {old: it for old, it in self._arenas.items() if old == self._folded}
        self._arenas[key] = arena, folds

    @torch.inference_mode()
    def fold(self, key: str, half: int, scales: list[float], top: float) -> int:
        """Fold a half in, and put back what it isn't on; the bytes of the half."""
        (arena, folds), kept = self._arenas[key], self.kept
        arena.receive(half)
        kept.take(folds.weights)
        folds.check(half, scales, top, kept)
        # From here on weights are written.
        left = kept.names - set(folds.weights)
        kept.put_back(left)
        folds(half, scales, kept)
        arena.used()
        kept.drop(left)
        self._arenas, self._folded = {key: (arena, folds)}, key
        return arena.bytes

    @torch.inference_mode()
    def unfold(self) -> None:
        """Put all back."""
        self.kept.put_back(self.kept.names)
        self.kept.drop(self.kept.names)
