"""What happens comes out as the outcome it is; the rollout here is a model without an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

import toy
from rollproof import FactoryError, Outcome, Settings, check_rollout
from rollproof.outcome import FailureError, Witness, about
from rollproof.report import report_json, schema
from rollproof.settings import SettingsError
from rollproof.spec import UnknownClauseError, clauses, markdown, select, written

CHEAP = Settings(only=("SYNC-003", "BASE-001"))


async def outcomes(fault: str, settings: Settings = CHEAP) -> dict[str, tuple[Outcome, str]]:
    report = await check_rollout(toy.make, settings, fault=fault)
    return {result.clause: (result.outcome, result.message) for result in report.results}


async def test_a_right_rollout_passes_what_it_declares(tmp_path: Path):
    report = await check_rollout(toy.make, folder=tmp_path)
    assert report.ok
    assert report.outcomes(Outcome.FAIL, Outcome.ERROR, Outcome.BLOCKED) == set()
    assert report.outcomes(Outcome.NOT_APPLICABLE) == {
        *("SYNC-006", "SYNC-009", "ID-001", "ID-002", "LIFE-004", "NUM-005", "NUM-007", "NUM-008", "NUM-009"),
        *("CACHE-001", "CACHE-002", "CACHE-003", "CACHE-004", "CACHE-005"),
        *("FLIGHT-001", "FLIGHT-002", "FLIGHT-003"),
        *("COST-001", "COST-002", "COST-003", "SLEEP-001", "SLEEP-002"),
    }
    assert (tmp_path / "history.jsonl").read_text().count('"update ended"') > 20


async def test_a_rollout_without_logprobs_is_judged_by_its_tokens():
    toy_without = await check_rollout(WithoutLogprobs)
    assert toy_without.ok
    found = await check_rollout(WithoutLogprobs, CHEAP, fault="base")
    assert found.outcomes(Outcome.FAIL) == {"SYNC-002"}
    assert "greedy decoding of the base model gives these tokens" in found.results[0].message


def WithoutLogprobs(spec, fault="no-logprobs"):  # noqa: N802 - a factory that reads like a class
    class Toy(toy.Toy):
        capabilities = toy.Toy.capabilities - {toy.Capability.LOGPROBS}

        async def generate(self, request):
            completion = await super().generate(request)
            return toy.Completion(completion.token_ids)

    return _entered(Toy(spec, fault))


class _entered:  # noqa: N801 - a context manager like contextlib's own
    def __init__(self, rollout):
        self.rollout = rollout

    async def __aenter__(self):
        return self.rollout

    async def __aexit__(self, *_):
        return None


async def test_a_rollout_that_declares_nothing_is_judged_by_what_is_left():
    class Bare(toy.Toy):
        capabilities = frozenset()

        async def generate(self, request):
            if not self._version:
                raise RuntimeError("no adapter yet")
            return await super().generate(request)

    report = await check_rollout(lambda spec: _entered(Bare(spec)))
    assert report.ok
    families = {clause_id.partition("-")[0] for clause_id in report.outcomes(Outcome.PASS)}
    assert families == {"SYNC", "RANK", "NUM", "FAIL"}
    assert report.outcomes(Outcome.BLOCKED) == set()


async def test_right_logprobs_do_not_excuse_wrong_tokens():
    found = await outcomes("base")
    outcome, message = found["SYNC-002"]
    assert outcome == Outcome.FAIL
    assert "expected greedy tokens of version" in message
    assert found["SYNC-003"][0] == found["BASE-001"][0] == Outcome.BLOCKED


async def test_an_update_that_is_lost_is_attributed_to_the_version_that_serves():
    outcome, message = (await outcomes("forgets"))["SYNC-003"]
    assert outcome == Outcome.FAIL
    assert "these logprobs are those of version" in message


async def test_a_failure_has_a_witness_in_the_history(tmp_path: Path):
    report = await check_rollout(toy.make, CHEAP, tmp_path, fault="forgets")
    result = next(result for result in report.results if result.clause == "SYNC-003")
    (witness,) = result.witness
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["tick"] == witness["ended"]]
    assert (line["event"], line["started"]) == ("request ended", witness["started"])
    assert witness["token"] in range(3)  # versions this unlike can't share many tokens
    assert f"off for good from token {witness['token']} on, request {witness['started']}" in result.message
    jsonschema.validate(report_json(report), schema())
    assert not report.results[0].witness


async def test_declared_and_absent_fails():
    outcome, message = (await outcomes("no-logprobs"))["SYNC-002"]
    assert (outcome, "declares logprobs" in message) == (Outcome.FAIL, True)


async def test_a_hang_is_a_failure_with_a_name():
    outcome, message = (await outcomes("hangs", Settings(only=("SYNC-002",), deadline_scale=0.01)))[
        "SYNC-002"
    ]
    assert outcome == Outcome.FAIL
    assert "update did not return within 1.2 s: it hangs" in message


async def test_the_clause_that_saw_the_rollout_die_is_blamed_in_one_line():
    found = await outcomes("dies")
    assert found["SYNC-002"] == (Outcome.FAIL, "generate raised RuntimeError: the engine died")
    assert found["SYNC-003"][0] == Outcome.BLOCKED


def test_what_is_put_before_a_failure_leaves_it_as_fatal_as_it_was():
    for fatal in (True, False):
        with (
            pytest.raises(FailureError, match="^on q_proj alone: it hangs$") as told,
            about("on q_proj alone"),
        ):
            raise FailureError("it hangs", fatal=fatal, witness=[Witness(1, 2, 3, 4)])
        assert told.value.fatal == fatal
        assert told.value.witness == (Witness(1, 2, 3, 4),)


async def test_a_rollout_that_does_not_start_fails():
    report = await check_rollout(toy.make, CHEAP, fault="no-start")
    assert not report.ok
    assert report.results[0].message == "start raised RuntimeError: no engine here"


class Raises(toy.Toy):
    """Declares nothing of the base before the sync, and does not raise as it then has to."""

    capabilities = frozenset()
    how = "hangs"

    async def generate(self, request):
        if self._version:
            return await super().generate(request)
        if self.how == "hangs":
            await asyncio.Event().wait()
        return toy.Completion((), finish_reason="abort")


@pytest.mark.parametrize("how", ["hangs", "aborts"])
async def test_only_an_error_of_the_rollouts_is_a_refusal(how: str):
    class Odd(Raises):
        pass

    Odd.how = how
    settings = Settings(only=("SYNC-001",), deadline_scale=0.01)
    report = await check_rollout(lambda spec: _entered(Odd(spec)), settings)
    assert report.outcomes(Outcome.FAIL) == {"SYNC-001"}


async def test_a_call_cancelled_inside_the_rollout_is_its_failure():
    class Cancels(toy.Toy):
        async def generate(self, request):
            raise asyncio.CancelledError

    report = await check_rollout(lambda spec: _entered(Cancels(spec)), Settings(only=("SYNC-002",)))
    assert report.outcomes(Outcome.FAIL) == {"SYNC-002"}
    assert "generate was cancelled inside the rollout" in report.results[0].message


async def test_a_rollout_that_does_not_end_does_not_conform():
    class Stuck(_entered):
        async def __aexit__(self, *_):
            await asyncio.Event().wait()

    settings = Settings(only=("SYNC-002",), deadline_scale=0.02)
    report = await check_rollout(lambda spec: Stuck(toy.Toy(spec)), settings)
    assert report.outcomes(Outcome.PASS) == {"SYNC-002"}
    assert report.troubles == ["the rollout did not end: close did not return within 1.2 s: it hangs"]
    assert not report.ok


async def test_what_comes_back_in_the_wrong_form_fails():
    class Nothing(toy.Toy):
        async def generate(self, request):
            return None

        loaded_adapters = None

    report = await check_rollout(lambda spec: _entered(Nothing(spec)), Settings(only=("SYNC-002", "ID-001")))
    assert report.outcomes(Outcome.FAIL) == {"SYNC-002"}
    assert report.results[0].message == "generate returned a NoneType, not a Completion"
    report = await check_rollout(lambda spec: _entered(Uncallable(spec)), Settings(only=("LIFE-001",)))
    assert "LIFE-001" in report.outcomes(Outcome.FAIL)


class Uncallable(toy.Toy):
    loaded_adapters = None


async def test_an_oracle_that_can_not_be_had_is_told_before_the_rollout_starts():
    def never(spec):
        raise AssertionError("started")

    report = await check_rollout(never, Settings(only=("SYNC-002",), oracle_device="cuda:99"))
    assert report.results[0].outcome == Outcome.ERROR
    assert "the oracle can't run on 'cuda:99'" in report.results[0].message


async def test_bad_input_is_refused_before_anything_starts():
    with pytest.raises(UnknownClauseError, match=r"unknown clause 'SYNC-999'; there are SYNC-001"):
        await check_rollout(toy.make, Settings(only=("SYNC-999",)))
    with pytest.raises(FactoryError, match="can't be imported: ModuleNotFoundError"):
        await check_rollout("no_such_module:make")
    with pytest.raises(SettingsError, match="no model at 'nowhere'"):
        Settings(model="nowhere")
    with pytest.raises(SettingsError, match="allowed: float32, bfloat16, float16"):
        Settings(dtype="int8")
    with pytest.raises(SettingsError, match="profile is 'all'; allowed: core, full"):
        Settings(profile="all")


def test_selecting_a_clause_brings_what_it_requires_in_order():
    assert [clause.id for clause in select(["CACHE-001"])] == ["SYNC-002", "SYNC-003", "CACHE-001"]


def test_what_reproduces_a_failure_is_what_makes_a_difference_to_it():
    # --only brings the clause whatever its profile, and the baseline would hide the failure.
    settings = Settings(dtype="bfloat16", max_lora_rank=8, profile="full", baseline="known.toml")
    assert settings.options() == " --dtype bfloat16 --seed 0 --max-lora-rank 8"


def test_a_profile_holds_what_its_clauses_require_and_a_named_clause_is_run_whatever_its_profile():
    core, full = select([], "core"), select([], "full")
    assert {clause.profile for clause in core} == {"core"}
    assert full == clauses()
    assert set(core) < set(full)
    rare = next(clause for clause in full if clause.profile == "full")
    assert rare in select([rare.id], "core")


@pytest.mark.parametrize("clause", written(), ids=lambda clause: clause.id)
def test_every_clause_is_whole(clause):
    order = [other.id for other in clauses()]
    assert clause.level in ("MUST", "SHOULD")
    assert clause.level in clause.text
    assert all(order.index(required) < order.index(clause.id) for required in clause.requires)
    assert clause.bugs
    assert bool(clause.check) != bool(clause.reason)
    assert not clause.check or callable(clause.function())


def test_a_clause_without_a_check_is_written_down_and_never_run():
    assert not [clause for clause in select([]) if clause.reason]
    with pytest.raises(UnknownClauseError, match="clause MODE-001 has no check: A layout is chosen when"):
        select(["MODE-001"])
    assert "- Not checked: A layout is chosen" in markdown()


def test_the_specification_says_what_the_list_of_clauses_says():
    spec = Path(__file__).parents[1] / "conformance/rollproof/SPEC.md"
    assert markdown() in spec.read_text(), "run: python -m rollproof.spec, and put it into SPEC.md"
