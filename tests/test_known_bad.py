"""The kit proves itself: each known-bad rollout fails exactly its clauses, right ones fail none."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from known_bad import KNOWN_BAD, ODD_BUT_RIGHT, Case, started
from known_bad.kills import markdown
from rollproof import Outcome, Report, Settings, check_rollout
from rollproof.bench import Bench
from rollproof.protocol import RolloutSpec
from rollproof.runner import device, versions
from rollproof.spec import clauses
from rollproof_reference import AsyncRollout


@pytest.fixture(scope="module")
def kills(pytestconfig: pytest.Config) -> Iterator[dict[str, Report]]:
    """Every known-bad rollout's report; with ``--kills FILE`` they are written down as a matrix."""
    reports: dict[str, Report] = {}
    yield reports
    if file := pytestconfig.getoption("kills"):
        docs = {case.name: case.fault for case in KNOWN_BAD}
        found = versions()
        told = [f"vLLM {found['vllm']}", f"torch {found['torch']}", device().partition(" ")[0]]
        text = markdown(reports, docs, told)
        Path(file).write_text(text, encoding="utf-8")
        print(text)


@pytest.fixture(scope="module")
def bench() -> Bench:
    """All judge with one model, so what the oracle measures is the same for all."""
    return Bench()


def settings(spec: RolloutSpec) -> Settings:
    return Settings(model=spec.model_path, dtype=spec.dtype)


@pytest.mark.parametrize("case", KNOWN_BAD, ids=lambda case: case.name)
async def test_known_bad_fails_exactly_its_clauses(
    case: Case, running: AsyncRollout, spec: RolloutSpec, bench: Bench, kills: dict[str, Report]
):
    if case.cpu_only and torch.cuda.is_available():
        pytest.skip("a fault of vLLM's CPU kernels")
    if case.gpu_only and not torch.cuda.is_available():
        pytest.skip("a fault that only a GPU shows")
    report = await check_rollout(functools.partial(started, case, running), settings(spec), bench=bench)
    kills[case.name] = report
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
async def test_odd_but_right_passes_whole(case: Case, running: AsyncRollout, spec: RolloutSpec, bench: Bench):
    report = await check_rollout(functools.partial(started, case, running), settings(spec), bench=bench)
    bad = [r for r in report.results if r.outcome not in (Outcome.PASS, Outcome.NOT_APPLICABLE)]
    assert not bad
    assert report.ok
