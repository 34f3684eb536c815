"""The kit proves itself: each known-bad rollout fails exactly its clauses, right ones fail none."""

from __future__ import annotations

import functools

import pytest
import torch

from known_bad import KNOWN_BAD, ODD_BUT_RIGHT, Case, started
from rollproof import Outcome, Settings, check_rollout
from rollproof.protocol import RolloutSpec
from rollproof.spec import clauses
from rollproof_reference import AsyncRollout


def settings(spec: RolloutSpec) -> Settings:
    return Settings(model=spec.model_path, dtype=spec.dtype)


@pytest.mark.parametrize("case", KNOWN_BAD, ids=lambda case: case.name)
async def test_known_bad_fails_exactly_its_clauses(case: Case, running: AsyncRollout, spec: RolloutSpec):
    if case.cpu_only and torch.cuda.is_available():
        pytest.skip("a fault of vLLM's CPU kernels")
    report = await check_rollout(functools.partial(started, case, running), settings(spec))
    told = {r.clause: r.message for r in report.results if r.outcome in (Outcome.FAIL, Outcome.ERROR)}
    assert set(told) == case.fails, told
    assert report.outcomes(Outcome.FAIL) == case.fails
    assert not report.ok
    for message in told.values():
        assert case.word in message


def test_every_clause_that_must_hold_has_a_victim():
    killed = {clause_id for case in KNOWN_BAD for clause_id in case.fails}
    assert {clause.id for clause in clauses() if clause.level == "MUST"} <= killed


@pytest.mark.parametrize("case", ODD_BUT_RIGHT, ids=lambda case: case.name)
async def test_odd_but_right_passes_whole(case: Case, running: AsyncRollout, spec: RolloutSpec):
    report = await check_rollout(functools.partial(started, case, running), settings(spec))
    bad = [r for r in report.results if r.outcome not in (Outcome.PASS, Outcome.NOT_APPLICABLE)]
    assert not bad
    assert report.ok
