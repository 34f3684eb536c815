"""What updates do to requests that run: the longest time without a token, tokens lost, throughput."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from rollproof_benchmarks.traffic import REPEATS, Traffic, every, requests, run, summary

EVERY = 0.05
"""Seconds between the beginnings of two updates."""


def memory() -> dict[str, float]:
    """MiB that this process has on the host, and that the device has given away."""
    import psutil
    import torch

    found = {"host MiB": psutil.Process().memory_info().rss / 2**20}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["device MiB"] = (total - free) / 2**20
    return found


def test_longest_gap(
    benchmark: Any,
    updated: Any,
    running: Any,
    trainer: Any,
    amounts: dict[str, int],
    told: dict[str, Any],
    on_gpu: bool,
):
    """The longest time between two tokens of a request, with an update every 50 ms and without."""
    if not hasattr(updated, "stream"):
        pytest.skip("a rollout without stream() shows no time of a token")
    tokens = 512 if on_gpu else 64
    running.run(updated.update_adapter(trainer.step()))
    running.run(run(updated, requests(amounts["requests"], 16, 0)))
    took: list[float] = []

    async def update() -> None:
        adapter = trainer.step()
        began = time.perf_counter()
        await updated.update_adapter(adapter)
        took.append(time.perf_counter() - began)

    without: list[Traffic] = []
    beside: list[Traffic] = []

    def measure() -> None:
        salt = 1 + len(beside)
        asked = requests(amounts["requests"], tokens, salt)
        without.append(running.run(run(updated, asked)))
        beside.append(running.run(run(updated, asked, every(EVERY, update))))

    benchmark.pedantic(measure, rounds=REPEATS)
    plain, swapped = ([max(one.gaps) for one in some] for some in (without, beside))
    told.update(
        updates=summary(took),
        longest_gap_ms=1e3 * statistics.median(plain),
        longest_gap_with_updates_ms=1e3 * statistics.median(swapped),
        longest_gap_ratio=statistics.median(swapped) / statistics.median(plain),
        median_gap_ms=1e3 * statistics.median(gap for one in without for gap in one.gaps),
        throughput=statistics.median(one.throughput for one in without),
        throughput_with_updates=statistics.median(one.throughput for one in beside),
        tokens_lost=sum(one.lost for one in [*without, *beside]),
        requests=amounts["requests"],
        memory=memory(),
    )
    assert told["tokens_lost"] == 0


@pytest.mark.parametrize("kind", ["adapter", "base", "fold"])
def test_throughput(request: pytest.FixtureRequest, running: Any, trainer: Any, throughput: Any, kind: str):
    """Tokens per second of many requests at once: with the adapter, of the base model, with it folded in."""
    if kind == "fold" and not running.reference:
        pytest.skip("only the reference is looked into")
    rollout = request.getfixturevalue("folding") if kind == "fold" else running.rollout
    if not hasattr(rollout, "stream"):
        pytest.skip("a rollout without stream() shows no time of a token")
    running.run(rollout.update_adapter(trainer.step()))
    throughput(running, rollout, adapter=kind != "base")
    if hasattr(rollout, "unload_adapter"):
        running.run(rollout.unload_adapter())
