"""The slope of memory readings: what grows is seen, and what steps, spikes or settles is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rollproof.memory import host_bytes, slope


def noise(seed: int, n: int = 180) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_bounds_hold_the_slope_in_nearly_all_of_many_noisy_lines():
    line = torch.arange(180, dtype=torch.float64)
    found = [slope((0.02 * line + noise(seed)).tolist()) for seed in range(300)]
    assert sum(not one.low <= 0.02 <= one.high for one in found) <= 2
    assert all(one.low <= one.middle <= one.high for one in found)
    assert sum(one.high - one.low for one in found) / len(found) < 0.02


@pytest.mark.parametrize("height", [1.0, 1e6])
def test_one_step_and_single_spikes_are_no_growth(height: float):
    line = torch.arange(180)
    readings = height * (line >= 90) + height * (line % 10 == 0)
    assert slope((readings + 0.001 * noise(0)).tolist()).low < 0.001 * height


def test_a_leak_that_the_allocator_hands_out_in_pages_is_seen():
    pages = (torch.arange(180) * 0.25).floor() * 4096
    found = slope(pages.tolist())
    assert 0.8 * 1024 < found.low <= found.middle <= found.high < 1.2 * 1024


def test_too_few_readings_give_no_bounds():
    with pytest.raises(ValueError, match="36 readings are too few"):
        slope([0.0] * 36)


def test_the_memory_of_a_process_is_read_and_one_that_is_gone_is_named():
    assert host_bytes([os.getpid()]) > 1 << 20
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ProcessLookupError, match=f"no process {ended.pid}"):
        host_bytes([ended.pid])
