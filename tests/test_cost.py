"""COST on a rollout without an engine, whose counters are what the test makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

import toy
from rollproof import Outcome, Settings, check_rollout
from rollproof.protocol import Adapter, Capability, Completion, GenerateRequest, RolloutSpec


class Counting(toy.Toy):
    """Counts as many steps for a request as ``steps`` says of the updates and requests so far."""

    capabilities = toy.Toy.capabilities | {Capability.COUNTERS}
    names = ("adapter_reads", "adapter_bytes", "engine_steps")

    def __init__(self, spec: RolloutSpec, steps: Callable[[int, int], int]) -> None:
        super().__init__(spec)
        self._steps = steps
        self._requests = 0
        self._counted = dict.fromkeys(self.names, 0)

    async def generate(self, request: GenerateRequest) -> Completion:
        self._counted["engine_steps"] += self._steps(self._counted["adapter_reads"], self._requests)
        self._requests += 1
        return await super().generate(request)

    async def update_adapter(self, adapter: Adapter) -> None:
        await super().update_adapter(adapter)
        self._counted["adapter_reads"] += 1
        self._counted["adapter_bytes"] += sum(4 * t.numel() for t in adapter.tensors.values())

    async def counters(self) -> dict[str, int]:
        return {name: self._counted[name] for name in self.names}


async def judged(
    steps: Callable[[int, int], int], names: tuple[str, ...] = Counting.names
) -> tuple[str, str]:
    @asynccontextmanager
    async def make(spec: RolloutSpec) -> AsyncIterator[Counting]:
        rollout = Counting(spec, steps)
        rollout.names = names
        yield rollout

    report = await check_rollout(make, Settings(only=("COST-003",)))
    return report.results[-1].outcome, report.results[-1].message


async def test_a_rollout_that_takes_more_steps_after_an_update_fails():
    outcome, message = await judged(lambda updates, _: 16 + updates)
    assert outcome == Outcome.FAIL
    assert message == "4 completions took 92 steps before an update and 96 after it"


@pytest.mark.parametrize(
    ("steps", "names", "told"),
    [
        (lambda _, requests: 16 + requests, Counting.names, "without an update between them"),
        (lambda *_: 16, ("adapter_reads",), "no 'engine_steps', only adapter_reads"),
    ],
)
async def test_nothing_is_claimed_of_steps_that_vary_or_are_not_counted(steps, names, told: str):
    outcome, message = await judged(steps, names)
    assert outcome == Outcome.NOT_APPLICABLE
    assert told in message


async def test_a_count_that_stands_still_is_no_pass():
    outcome, message = await judged(lambda *_: 0)
    assert outcome == Outcome.FAIL
    assert "took 0 steps by the rollout's count" in message
