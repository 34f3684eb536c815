"""A clock inside the worker of an engine that adapters are folded into. Only such an engine may import it."""

from __future__ import annotations

import torch

from rollproof_reference.fold_worker import FoldWorker

from .worker import timed

_MOST = 1 << 31
"""Bytes that the fastest copy is measured with, where an update writes more."""


class TimedFoldWorker(FoldWorker):
    """The reference's worker, with a clock."""

    _rollproof_last: tuple[str, int, list[float], float]

    def rollproof_fold(self, key: str, half: int, scales: list[float], top: float) -> None:
        """Fold, and remember what."""
        super().rollproof_fold(key, half, scales, top)
        self._rollproof_last = key, half, scales, top

    def rollproof_time_copies(self, rounds: int) -> dict[str, float]:
        """Seconds (medians) to fold the last adapter once more, and for the fastest copy of as many bytes as
        that writes, which reads as many as it writes, too."""
        folder = self.rollproof_folder
        assert folder is not None
        key, half, scales, _ = self._rollproof_last
        _, folds = folder._arenas[key]
        size = sum(weight.numel() * weight.element_size() for weight in folds.weights.values())
        device = next(iter(folds.weights.values())).device
        of = torch.empty(min(size, _MOST), dtype=torch.uint8, device=device)
        to = torch.empty_like(of)
        with torch.inference_mode():
            return {
                "copy": timed(lambda: folds(half, scales, folder.kept), rounds, device),
                "floor": timed(lambda: to.copy_(of), rounds, device) * size / of.numel(),
                "bytes": float(size),
            }
