"""Whether memory grows with the updates: readings of processes and devices, and a slope with its bounds.

Nothing here knows a rollout or a clause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import psutil
import torch

BLOCK = 9
"""Readings whose median counts as one. Neighbouring readings share the allocator's state, so they are not
independent, which a rank test takes for granted; medians of blocks are less so, and one spike in a
block does nothing."""

Z = 3.29
"""The slope lies within its bounds with a confidence of 99.9 %."""


@dataclass(frozen=True)
class Slope:
    """Growth a reading, in the readings' own unit: the median of all slopes, and its bounds."""

    low: float
    middle: float
    high: float


def slope(readings: Sequence[float]) -> Slope:
    """The Theil-Sen slope of the readings' block medians, with Sen's bounds.

    P. K. Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau", J. Am. Stat. Assoc. 63
    (1968): of the N slopes between two of n points, in order, the bounds are those of rank
    (N - C) / 2 and (N + C) / 2 + 1, with C = z sqrt(n (n - 1) (2 n + 5) / 18). No normal errors are
    assumed, and up to 29 % of the points may be anything. One step of any height leaves the lower
    bound at zero, unlike a least-squares line. Raises ValueError for too few readings.
    """
    points = [median(readings[i : i + BLOCK]) for i in range(0, len(readings) - BLOCK + 1, BLOCK)]
    n = len(points)
    slopes = sorted((points[j] - points[i]) / (j - i) / BLOCK for i, j in combinations(range(n), 2))
    reach = Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = math.floor((len(slopes) - reach) / 2), math.ceil((len(slopes) + reach) / 2) + 1
    if low < 1 or high > len(slopes):
        raise ValueError(f"{len(readings)} readings are too few for a slope with bounds")
    return Slope(slopes[low - 1], median(slopes), slopes[high - 1])


def host_bytes(process_ids: Sequence[int]) -> int:
    """The resident memory of these processes together. Raises ProcessLookupError for one that is gone."""
    try:
        return sum(psutil.Process(pid).memory_info().rss for pid in process_ids)
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"there is no process {error.pid}") from error


def device_bytes() -> int | None:
    """What is in use on all CUDA devices that this process sees, whoever uses it; None without one."""
    if not torch.cuda.is_available():
        return None
    infos = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    return sum(total - free for free, total in infos)
