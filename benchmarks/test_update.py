"""How long an update takes: until it is acknowledged, and until a token of the new version is there."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from rollproof.protocol import Adapter, GenerateRequest
from rollproof_benchmarks.traffic import summary

PROMPT = tuple(range(5, 69))
WARM = 3


def test_acknowledged(
    benchmark: Any, updated: Any, running: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """From update_adapter() to its return, with nothing else running."""

    def step() -> tuple[tuple[Adapter], dict[str, Any]]:
        return (trainer.step(),), {}

    def update(adapter: Adapter) -> None:
        running.run(updated.update_adapter(adapter))

    benchmark.pedantic(update, setup=step, rounds=amounts["rounds"], warmup_rounds=WARM)


def test_first_token(
    benchmark: Any, updated: Any, running: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """From update_adapter() to the first token of a request that began when it returned."""
    if not hasattr(updated, "generate"):
        pytest.skip("a baseline only updates")

    async def update_and_ask(adapter: Adapter) -> None:
        await updated.update_adapter(adapter)
        await updated.generate(GenerateRequest(PROMPT, 1))

    def step() -> tuple[tuple[Adapter], dict[str, Any]]:
        return (trainer.step(),), {}

    def update(adapter: Adapter) -> None:
        running.run(update_and_ask(adapter))

    benchmark.pedantic(update, setup=step, rounds=amounts["rounds"], warmup_rounds=WARM)


@pytest.mark.parametrize("updated", ["arena"], indirect=True)
def test_where_the_time_goes(
    benchmark: Any, updated: Any, running: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """An update over the arena in its parts: copying in the trainer, empty calls, the commit."""
    parts: dict[str, list[float]] = {"prepare": [], "empty call": [], "another": [], "commit": []}

    async def update(adapter: Adapter) -> None:
        times = [time.perf_counter()]
        prepared = updated._prepare(adapter)
        times.append(time.perf_counter())
        for _ in range(2):
            await updated.engine.collective_rpc("rollproof_counters")
            times.append(time.perf_counter())
        await updated._commit(adapter.version, prepared)
        times.append(time.perf_counter())
        for name, (before, after) in zip(parts, pairwise(times), strict=True):
            parts[name].append(after - before)

    def step() -> tuple[tuple[Adapter], dict[str, Any]]:
        return (trainer.step(),), {}

    def run(adapter: Adapter) -> None:
        running.run(update(adapter))

    benchmark.pedantic(run, setup=step, rounds=amounts["rounds"], warmup_rounds=WARM)
    told.update({name: summary(values[WARM:]) for name, values in parts.items()})


@pytest.mark.parametrize("updated", ["arena", "fold"], indirect=True)
def test_copy_beside_the_floor(
    benchmark: Any, updated: Any, running: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """What the device itself needs to take an update, and for the fastest copy of as many bytes."""
    running.run(updated.update_adapter(trainer.step()))
    engine = updated.engine

    def measure() -> dict[str, float]:
        return dict(running.run(engine.collective_rpc("rollproof_time_copies", args=(amounts["rounds"],)))[0])

    found = benchmark.pedantic(measure, rounds=3, warmup_rounds=1)
    told.update(
        copy_us=1e6 * found["copy"],
        floor_us=1e6 * found["floor"],
        copied_bytes=found["bytes"],
        copy_to_floor=found["copy"] / found["floor"],
    )
