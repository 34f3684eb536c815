"""How long an update takes: until it is acknowledged, and until a token of the new version is there."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.protocol import Adapter, GenerateRequest

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


def test_copy_beside_the_floor(
    benchmark: Any, running: Any, spec: Any, trainer: Any, amounts: dict[str, int], told: dict[str, Any]
):
    """What the device itself needs for the arena's copy, and for the fastest copy of as many bytes."""
    if not running.reference:
        pytest.skip("only the reference's arena is looked into")
    from rollproof_reference import AsyncRollout
    from rollproof_reference.start import strategy_for

    engine = running.rollout.engine
    worker = running.run(engine.collective_rpc("rollproof_describe"))[0]
    own = AsyncRollout(engine, spec, strategy_for("arena", spec, worker), running.rollout.served)
    running.run(own.update_adapter(trainer.step()))

    def measure() -> dict[str, float]:
        return dict(running.run(engine.collective_rpc("rollproof_time_copies", args=(amounts["rounds"],)))[0])

    found = benchmark.pedantic(measure, rounds=3, warmup_rounds=1)
    told.update(
        copy_us=1e6 * found["copy"],
        floor_us=1e6 * found["floor"],
        copied_bytes=found["bytes"],
        copy_to_floor=found["copy"] / found["floor"],
    )
    running.run(own.unload_adapter())
    own.sync.close()
