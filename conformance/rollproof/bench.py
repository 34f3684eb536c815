"""Oracles and what was measured with them, for one run or for several that share them."""

from __future__ import annotations

import torch

from .calibrate import Calibration
from .oracle import Oracle
from .protocol import RolloutSpec
from .session import SIZES


class Bench:
    """One oracle for each model, dtype and device, and one calibration for each seed on it.

    Used by one run at a time: each begins with ``clear``.
    """

    def __init__(self) -> None:
        self._oracles: dict[tuple[str, str, str], Oracle] = {}
        self._calibrations: dict[tuple[str, str, str, int], Calibration] = {}

    def oracle(self, spec: RolloutSpec, device: str) -> Oracle:
        """The oracle for what a rollout honours. Raises ModelError."""
        key = spec.model_path, spec.dtype, device
        if key not in self._oracles:
            self._oracles[key] = Oracle(spec.model_path, getattr(torch, spec.dtype), device)
        return self._oracles[key]

    def calibration(self, spec: RolloutSpec, device: str, seed: int) -> Calibration:
        """What was measured with that oracle and this seed."""
        key = spec.model_path, spec.dtype, device, seed
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(self.oracle(spec, device), seed, SIZES)
        return self._calibrations[key]

    def clear(self) -> None:
        """Forget every adapter, so that versions begin at 1 again."""
        for oracle in self._oracles.values():
            for version in oracle.versions[1:]:
                oracle.forget(version)
