"""A baseline excuses the failures it lists, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import toy
from rollproof import Outcome, Settings, check_rollout
from rollproof.baseline import BaselineError, Expected, read, weigh
from rollproof.bench import Bench

Judge = Callable[..., Awaitable[tuple[bool, list[Outcome]]]]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.fixture
def judge(tmp_path: Path, model_path: Path, bench: Bench) -> Judge:
    """``judge(text)``: how SYNC-002, SYNC-003, which an update that is lost fails, and SYNC-004, which
    requires it, come out with that baseline."""

    async def judged(text: str, fault: str = "forgets") -> tuple[bool, list[Outcome]]:
        (tmp_path / "known.toml").write_text(text)
        settings = Settings(model=str(model_path), only=("SYNC-004",), baseline=str(tmp_path / "known.toml"))
        report = await check_rollout(toy.make, settings, bench=bench, fault=fault)
        return report.ok, [result.outcome for result in report.results]

    return judged


async def test_what_requires_an_expected_failure_is_blocked_unless_it_is_listed_too(judge: Judge):
    one, two = '[SYNC-003]\nreason = "r"\n', '[SYNC-004]\nreason = "r"\n'
    assert await judge(one) == (False, ["pass", "expected-fail", "blocked"])
    assert await judge(one + two) == (True, ["pass", "expected-fail", "expected-fail"])
    assert await judge(two) == (False, ["pass", "fail", "expected-fail"])


async def test_what_is_disabled_is_not_run_and_shows_nothing(judge: Judge):
    text = '[SYNC-003]\nreason = "r"\nrun = false\n'
    assert await judge(text) == (False, ["pass", "disabled", "blocked"])
    assert await judge(text, fault="") == (False, ["pass", "disabled", "blocked"])


async def test_an_entry_for_what_passes_is_stale(judge: Judge):
    text = '[SYNC-003]\nreason = "r"\n'
    assert await judge(text, fault="") == (False, ["pass", "stale-expected-fail", "pass"])


def test_an_entry_excuses_a_failure_only():
    for outcome in (Outcome.ERROR, Outcome.NOT_APPLICABLE):
        assert weigh(Expected("r"), outcome, "told") == (outcome, "told")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[SYNC-999]\nreason = "r"', "names the unknown clause 'SYNC-999'; there are SYNC-001, "),
        ("[SYNC-002]", r"\[SYNC-002\] gives no reason: write reason = "),
        ('[SYNC-002]\nreason = " "', r"\[SYNC-002\] gives no reason"),
        ("[SYNC-002]\nreason = 3", r"\[SYNC-002\] gives no reason"),
        ('SYNC-002 = "r"', r"SYNC-002 is not a table: write \[SYNC-002\]"),
        ('[SYNC-002]\nreason = "r"\nrun = "no"', r"\[SYNC-002\] run is neither true nor false"),
        ('[SYNC-002]\nreason = "r"\nruns = false', r"\[SYNC-002\] has runs; allowed: reason, run"),
        ("[SYNC-002", "can't be read: Expected"),
        ("reason = '\xff'", "can't be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_baseline_that_can_not_be_used_is_told_in_one_line(tmp_path: Path, text: str, told: str):
    file = tmp_path / "known.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(BaselineError, match=told) as raised:
        read(str(file))
    assert "\n" not in str(raised.value)


async def test_a_bad_baseline_is_refused_before_anything_starts(tmp_path: Path):
    def never(spec):
        raise AssertionError("started")

    with pytest.raises(BaselineError, match="can't be read: .*[Dd]irectory"):
        await check_rollout(never, Settings(baseline=str(tmp_path)))


def test_no_file_expects_nothing():
    assert read("") == {}
