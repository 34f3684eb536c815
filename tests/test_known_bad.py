"""The kit proves itself: each known-bad rollout fails exactly its clauses, right ones fail none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import torch

from known_bad import KNOWN_BAD, ODD_BUT_RIGHT, REFERENCE, Case, kills, started
from rollproof import Outcome, Report, Settings, check_rollout
from rollproof.bench import Bench
from rollproof.protocol import RolloutSpec
from rollproof.spec import clauses
from rollproof_reference import AsyncRollout


def first_victims() -> set[str]:
    """For each clause the first case on the shared engine that fails it: what every change is tested with."""
    shared = [case for case in KNOWN_BAD if not (case.engine or case.model or case.gpu_only)]
    return {next((case.name for case in shared if clause.id in case.fails), "") for clause in clauses()}


FIRST = first_victims()


@pytest.fixture(scope="session")
def bench() -> Bench:
    """The oracle, and what was measured with it, are the same for every case."""
    return Bench()


TOY_ONLY = {"NUM-009"}
"""vLLM's CPU build starts no mixture of experts with LoRA: test_families.py has the victim, on a toy."""


async def judged(
    case: Case, running: AsyncRollout, spec: RolloutSpec, bench: Bench, only: Iterable[str] = ()
) -> Report:
    settings = Settings(
        model=case.model or spec.model_path,
        dtype=spec.dtype,
        deadline_scale=case.deadline_scale,
        profile="full",
        only=tuple(sorted(only)),
    )
    return await check_rollout(functools.partial(started, case, running), settings, bench=bench)


@pytest.mark.parametrize("case", KNOWN_BAD, ids=lambda case: case.name)
async def test_known_bad_fails_exactly_its_clauses(
    case: Case,
    running: AsyncRollout,
    spec: RolloutSpec,
    bench: Bench,
    record_property: Callable[[str, str], None],
    pytestconfig: pytest.Config,
):
    """With ``--kills``, all cases by all clauses; without, the first victims by those they have to fail."""
    if not pytestconfig.getoption("kills") and case.name not in FIRST:
        pytest.skip("judged by nox -s known_bad")
    if case.cpu_only and torch.cuda.is_available():
        pytest.skip("no fault on a GPU")
    if case.gpu_only and not torch.cuda.is_available():
        pytest.skip("a fault that only a GPU shows")
    only = () if pytestconfig.getoption("kills") else case.fails
    report = await judged(case, running, spec, bench, only)
    record_property("rollout", case.name)
    record_property("kills", kills.told(report))
    told = {r.clause: r.message for r in report.results if r.outcome in (Outcome.FAIL, Outcome.ERROR)}
    assert set(told) == case.fails, told
    assert report.outcomes(Outcome.FAIL) == case.fails
    assert not report.ok
    for message in told.values():
        assert case.word in message


def test_no_two_cases_share_a_name():
    names = [case.name for case in (*KNOWN_BAD, *ODD_BUT_RIGHT)]
    assert len(set(names)) == len(names)


def test_every_clause_that_must_hold_has_a_victim():
    killed = {clause_id for case in KNOWN_BAD for clause_id in case.fails}
    assert {clause.id for clause in clauses() if clause.level == "MUST"} <= killed | TOY_ONLY


@pytest.mark.parametrize("case", [REFERENCE, *ODD_BUT_RIGHT], ids=lambda case: case.name)
async def test_odd_but_right_passes_whole(
    case: Case, running: AsyncRollout, spec: RolloutSpec, bench: Bench, pytestconfig: pytest.Config
):
    if not pytestconfig.getoption("kills") and case is not REFERENCE:
        pytest.skip("judged by nox -s known_bad")
    report = await judged(case, running, spec, bench)
    bad = [r for r in report.results if r.outcome not in (Outcome.PASS, Outcome.NOT_APPLICABLE)]
    assert not bad
    assert report.ok
