"""How long an update takes: until it is acknowledged, and until a token of the new version is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from rollproof.protocol import Adapter, GenerateRequest
from rollproof_benchmarks.running import Running
from rollproof_benchmarks.traffic import summary
from rollproof_benchmarks.trainer import Trainer

PROMPT = tuple(range(5, 69))
WARM = 3

Updating = Callable[[Adapter], Coroutine[Any, Any, None]]


def measure(benchmark: Any, running: Running, trainer: Trainer, rounds: int, update: Updating) -> None:
    """Time what comes of each of the trainer's steps; the step itself isn't timed."""

    def step() -> tuple[tuple[Adapter], dict[str, Any]]:
        return (trainer.step(),), {}

    benchmark.pedantic(
        lambda adapter: running.run(update(adapter)), setup=step, rounds=rounds, warmup_rounds=WARM
    )


def test_acknowledged(
    benchmark: Any, updated: Any, running: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """From update_adapter() to its return, with nothing else running."""
    measure(benchmark, running, trainer, amounts["rounds"], updated.update_adapter)


def test_first_token(
    benchmark: Any, updated: Any, running: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """From update_adapter() to the first token of a request that began when it returned."""
    if not hasattr(updated, "generate"):
        pytest.skip("a baseline only updates")

    async def update_and_ask(adapter: Adapter) -> None:
        await updated.update_adapter(adapter)
        await updated.generate(GenerateRequest(PROMPT, 1))

    measure(benchmark, running, trainer, amounts["rounds"], update_and_ask)


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

    measure(benchmark, running, trainer, amounts["rounds"], update)
    told.update({name: summary(values[WARM:]) for name, values in parts.items()})


@pytest.mark.parametrize("updated", ["arena", "fold"], indirect=True)
def test_copy_beside_the_floor(
    benchmark: Any, updated: Any, running: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """What the device itself needs to take an update, and for the fastest copy of as many bytes."""
    running.run(updated.update_adapter(trainer.step()))
    engine = updated.engine

    def timed() -> dict[str, float]:
        return dict(running.run(engine.collective_rpc("rollproof_time_copies", args=(amounts["rounds"],)))[0])

    found = benchmark.pedantic(timed, rounds=3, warmup_rounds=1)
    told.update(
        copy_us=1e6 * found["copy"],
        floor_us=1e6 * found["floor"],
        copied_bytes=found["bytes"],
        copy_to_floor=found["copy"] / found["floor"],
    )
