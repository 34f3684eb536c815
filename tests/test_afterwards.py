"""A record is judged as the run was: the same clauses pass and fail, with no rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import toy
from conftest import MakeAdapter
from rollproof import Outcome, Settings, check_rollout
from rollproof.afterwards import judge_history
from rollproof.bench import Bench
from rollproof.candidates import BASE, Candidate, Mixed
from rollproof.cli import load
from rollproof.oracle import Oracle
from rollproof.outcome import Result
from rollproof.protocol import Adapter, Completion, GenerateRequest, RolloutSpec
from rollproof.reading import HistoryError, read
from rollproof.record import Recorder, recorded

CLAUSES = ("SYNC-001", "SYNC-002", "SYNC-003", "BASE-001", "BASE-002", "CACHE-001")
TOKENS = 24


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.fixture
def oracle(model_path: Path, bench: Bench) -> Oracle:
    """The oracle alone, which knows no adapter yet."""
    oracle = bench.oracle(RolloutSpec(str(model_path)), "cpu")
    bench.clear()
    return oracle


def afterwards(folder: Path, oracle: Oracle, **options: Any) -> dict[str, Result]:
    (history,) = read(folder / "history.jsonl")
    found = judge_history(history, oracle, lambda update: load(folder / "adapters", update), **options)
    return {result.clause: result for result in found}


@pytest.mark.parametrize("fault", ["", "base", "forgets", "everywhere", "stale"])
async def test_a_record_is_judged_as_the_run_was(
    fault: str, tmp_path: Path, model_path: Path, bench: Bench, oracle: Oracle
):
    @asynccontextmanager
    async def watched(spec: RolloutSpec) -> AsyncIterator[Any]:
        async with toy.make(spec, fault) as rollout:
            with Recorder(tmp_path / "history.jsonl", tmp_path / "adapters", dtype=spec.dtype) as recorder:
                yield recorded(rollout, recorder)

    report = await check_rollout(watched, Settings(str(model_path), only=CLAUSES), bench=bench)
    live = {result.clause: result.outcome for result in report.results}
    bench.clear()
    found = afterwards(tmp_path, oracle)
    judged = {clause: outcome for clause, outcome in live.items() if outcome != Outcome.NOT_APPLICABLE}
    assert {clause: found[clause].outcome for clause in judged} == judged, found
    wrong = {"base": "SYNC-002", "forgets": "SYNC-003", "everywhere": "BASE-001", "stale": "CACHE-001"}
    assert {c for c, outcome in judged.items() if outcome == Outcome.FAIL} == (
        {wrong[fault]} if fault else set()
    )


@dataclass
class Script:
    """A record in the making: what a rollout would have sampled, by the oracle."""

    folder: Path
    oracle: Oracle
    recorder: Recorder

    def update(self, adapter: Adapter) -> None:
        with self.recorder.update(adapter):
            self.oracle.add(adapter)

    def request(self, index: int, adapter: bool = True) -> GenerateRequest:
        prompt = torch.randint(0, 1000, (20,), generator=torch.Generator().manual_seed(index))
        return GenerateRequest(tuple(prompt.tolist()), TOKENS, temperature=index % 2, adapter=adapter)

    def completion(self, request: GenerateRequest, version: Candidate) -> Completion:
        """Tokens and logprobs of a version, or logprobs of a mix beside tokens of its first."""
        first = version.parts[0][0] if isinstance(version, Mixed) else version
        generator = torch.Generator().manual_seed(request.prompt_token_ids[0])
        sample = self.oracle.sample(
            first, [request.prompt_token_ids], TOKENS, request.temperature, generator
        )[0]
        if isinstance(version, Mixed):
            sample = toy.greedy(self.oracle, version, request)
        scores = self.oracle.score(version, [sample])[0]
        return Completion(sample.tokens, tuple(scores.logprobs.tolist()))

    def ask(self, indices: range, version: Candidate, adapter: bool = True) -> None:
        for index in indices:
            request = self.request(index, adapter)
            with self.recorder.request(request) as answer:
                answer(self.completion(request, version))

    def judge(self, **options: Any) -> dict[str, Result]:
        self.recorder.close()
        for version in self.oracle.versions[1:]:
            self.oracle.forget(version)
        return afterwards(self.folder, self.oracle, **options)


@pytest.fixture
def script(tmp_path: Path, oracle: Oracle) -> Iterator[Script]:
    recorder = Recorder(
        tmp_path / "history.jsonl", tmp_path / "adapters", dtype="float32", in_flight="continue-mixed"
    )
    with recorder:
        yield Script(tmp_path, oracle, recorder)


def overtake(script: Script, adapter: Adapter, version: Candidate, count: int = 2) -> None:
    """Greedy requests that run while an update does."""
    with ExitStack() as stack:
        requests = [script.request(100 + 2 * index) for index in range(count)]
        answers = [stack.enter_context(script.recorder.request(request)) for request in requests]
        script.update(adapter)
        for request, answer in zip(requests, answers, strict=True):
            answer(script.completion(request, version))


SWITCHED = 19 + 10
"""The position of token 10."""


@pytest.mark.parametrize(
    ("version", "outcome", "word"),
    [
        (Mixed(((1, 0), (2, SWITCHED))), Outcome.PASS, "are shown to be no other"),
        (Mixed(((1, 0), (2, SWITCHED)), recomputed=(SWITCHED,)), Outcome.PASS, "are shown to be no other"),
        (1, Outcome.ERROR, "underpowered: none of 2 overtaken completions shows continue-mixed"),
        (
            Mixed(((1, 0), (BASE, SWITCHED))),
            Outcome.FAIL,
            "beside the update to version 2: completion 1 of 2",
        ),
        (BASE, Outcome.FAIL, "these logprobs are those of the base model"),
    ],
    ids=str,
)
def test_a_request_that_an_update_overtook_is_judged_by_the_policy(
    script: Script, adapter: MakeAdapter, version: Candidate, outcome: Outcome, word: str
):
    script.update(adapter(1))
    overtake(script, adapter(2), version)
    found = script.judge()
    assert (found["FLIGHT-001"].outcome, word in found["FLIGHT-001"].message) == (outcome, True), found
    lost = Outcome.BLOCKED if outcome == Outcome.FAIL else Outcome.PASS
    assert found["FLIGHT-002"].outcome == lost


def test_another_policy_can_be_told_than_was_recorded(script: Script, adapter: MakeAdapter):
    script.update(adapter(1))
    overtake(script, adapter(2), 1)
    assert script.judge(in_flight="finish-on-old")["FLIGHT-001"].outcome == Outcome.PASS
    assert (
        afterwards(script.folder, script.oracle, in_flight="restart")["FLIGHT-001"].outcome == Outcome.ERROR
    )


def test_a_request_that_never_ended_is_lost(script: Script, adapter: MakeAdapter):
    script.update(adapter(1))
    overtake(script, adapter(2), Mixed(((1, 0), (2, SWITCHED))))
    stuck = script.recorder.request(script.request(1))
    stuck.__enter__()
    found = script.judge()["FLIGHT-002"]
    assert found.outcome == Outcome.FAIL
    assert "1 requests never ended, though the record was closed; the first is request 9" in found.message


def test_every_clause_says_why_it_can_not_be_judged(script: Script, adapter: MakeAdapter):
    script.ask(range(4), BASE)
    found = script.judge()
    assert {result.outcome for result in found.values()} == {Outcome.NOT_APPLICABLE}
    assert "no update succeeded" in found["SYNC-001"].message
    assert "no request ran beside an update" in found["FLIGHT-002"].message


def test_before_the_first_update_the_base_model_answers_or_nothing(script: Script, adapter: MakeAdapter):
    script.ask(range(8), BASE)
    script.update(adapter(1))
    assert script.judge()["SYNC-001"].outcome == Outcome.PASS


def test_a_refusal_before_the_first_update_is_right(script: Script, adapter: MakeAdapter):
    with pytest.raises(RuntimeError), script.recorder.request(script.request(0)):
        raise RuntimeError("no adapter yet")
    script.update(adapter(1))
    found = script.judge()["SYNC-001"]
    assert (found.outcome, "1 adapter requests" in found.message) == (Outcome.PASS, True)


def test_what_can_not_be_told_apart_is_named(script: Script, adapter: MakeAdapter):
    """A third version a hair from the second: nobody can say which of them answered."""
    second = adapter(2)
    third = Adapter(3, second.config, {name: 1.00002 * t for name, t in second.tensors.items()})
    script.update(adapter(1))
    script.update(second)
    script.update(third)
    script.ask(range(10), 3)
    found = script.judge()["SYNC-003"]
    assert found.outcome == Outcome.ERROR
    assert found.message.startswith(
        "underpowered: of 10 completions after version 3, told apart from the base model on 10 (the best is "
    )
    assert "from version 1 on 10 (" in found.message
    assert "from version 2 on 0 (" in found.message


def test_a_clause_with_too_little_power_hides_no_failure(script: Script, adapter: MakeAdapter):
    """As in a training that begins with an adapter next to the base model, and loses a later one."""
    first = adapter(1)
    script.update(Adapter(1, first.config, {name: 1e-3 * t for name, t in first.tensors.items()}))
    script.ask(range(4), 1)
    script.update(adapter(2))
    script.ask(range(4, 8), BASE)
    found = script.judge()
    assert (found["SYNC-002"].outcome, found["SYNC-003"].outcome) == (Outcome.ERROR, Outcome.FAIL)
    assert "these logprobs are those of" in found["SYNC-003"].message


def test_of_many_completions_a_sample_is_judged(script: Script, adapter: MakeAdapter):
    script.update(adapter(1))
    script.ask(range(19), 1)
    script.ask(range(19, 20), BASE)
    found = [script.judge(most=9, seed=0)["SYNC-002"]]
    found += [afterwards(script.folder, script.oracle, most=9, seed=seed)["SYNC-002"] for seed in range(1, 5)]
    assert {result.completions for result in found} == {9}
    assert {result.outcome for result in found} == {Outcome.PASS, Outcome.FAIL}
    assert all("9 of 20 completions judged" in r.message for r in found if r.outcome == Outcome.PASS)


def test_short_completions_have_a_tolerance_of_their_own(script: Script, adapter: MakeAdapter):
    """And those that tell nothing are no reason to doubt the others."""
    script.update(adapter(1))
    script.ask(range(10), 1)
    for index in range(10, 14):
        request = script.request(index)
        whole = script.completion(request, 1)
        assert whole.logprobs is not None
        with script.recorder.request(request) as answer:
            answer(Completion(whole.token_ids[:1], whole.logprobs[:1], "stop"))
    assert script.judge()["SYNC-002"].outcome == Outcome.PASS


def test_a_right_run_in_half_precision_fails_at_no_length(
    tmp_path: Path, model_path: Path, adapter: MakeAdapter
):
    """Logprobs as an engine gives them that computes base and adapter apart, in bfloat16."""
    oracle = Oracle(model_path, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    with Recorder(tmp_path / "history.jsonl", tmp_path / "adapters", dtype="bfloat16") as recorder:
        for version in (1, 2):
            with recorder.update(adapter(version)):
                oracle.add(adapter(version))
            for n_tokens in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
                prompts = torch.randint(0, 1000, (8, 20), generator=generator).tolist()
                samples = oracle.sample(version, list(map(tuple, prompts)), n_tokens, 1.0, generator)
                noise = oracle.noise(version, samples)
                for sample, scores, off in zip(samples, oracle.score(version, samples), noise, strict=True):
                    with recorder.request(GenerateRequest(sample.prompt, n_tokens, 1.0)) as answer:
                        answer(Completion(sample.tokens, tuple((scores.logprobs + off[1]).tolist())))
    for version in (1, 2):
        oracle.forget(version)
    found = afterwards(tmp_path, oracle, most=80)
    assert found["SYNC-002"].outcome == found["SYNC-003"].outcome == Outcome.PASS, found
    assert found["SYNC-002"].completions == 80


def test_an_adapter_that_is_not_there_or_another_one_is_told(script: Script, adapter: MakeAdapter):
    script.update(adapter(1))
    script.ask(range(2), 1)
    script.judge()
    kept = script.folder / "adapters" / "1"
    script.oracle.forget(1)
    config = kept / "adapter_config.json"
    before = config.read_text()
    config.write_text(before.replace('"lora_alpha": 16', '"lora_alpha": 17'))
    with pytest.raises(HistoryError, match="the adapter of version 1 in .* is another one than was sent"):
        afterwards(script.folder, script.oracle)
    config.write_text("{")
    with pytest.raises(HistoryError, match="the adapter of version 1 can't be read"):
        afterwards(script.folder, script.oracle)
    kept.rename(script.folder / "elsewhere")
    with pytest.raises(
        HistoryError, match="the adapter of version 1 is missing: there is no folder .*/adapters/1"
    ):
        afterwards(script.folder, script.oracle)


def test_a_version_with_two_adapters_and_a_foreign_model_are_told(script: Script, adapter: MakeAdapter):
    script.update(adapter(1))
    script.update(adapter(1, seed=1))
    script.ask(range(1), 1)
    with pytest.raises(HistoryError, match="version 1 was sent with two different adapters"):
        script.judge()
    (history,) = read(script.folder / "history.jsonl")
    history.updates.pop()
    script.oracle.vocab_size, size = 10, script.oracle.vocab_size
    try:
        with pytest.raises(HistoryError, match="it isn't the model of this run"):
            judge_history(history, script.oracle, lambda update: adapter(update.version))
    finally:
        script.oracle.vocab_size = size


def test_an_adapter_of_another_model_is_told(script: Script, adapter: MakeAdapter):
    other = adapter(1)
    name = next(iter(other.tensors))
    other.tensors[name] = torch.zeros(8, 3)  # type: ignore[index]
    with script.recorder.update(other):
        pass
    script.ask(range(1), BASE)
    with pytest.raises(HistoryError, match="the adapter of version 1 doesn't fit the model"):
        script.judge()
