"""The judge on changed histories: what changes the meaning of a right record fails, what doesn't passes.

No engine, and next to no model: scores are computed once for each completion and candidate, and kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toy
from rollproof.afterwards import judge_history
from rollproof.candidates import BASE, Candidate, Mixed
from rollproof.history import Exchange, History
from rollproof.models import make_adapter
from rollproof.oracle import Oracle, Sample, Scores
from rollproof.outcome import Outcome, Result
from rollproof.protocol import Adapter, Capability, Completion, GenerateRequest

PROMPT, TOKENS = 12, 12
VERSIONS = (1, 2, 3)
EACH = 4
"""Requests after each update, and as many of the base model."""


class Holding:
    """The versions that an oracle holds, no two of which are alike."""

    def __init__(self) -> None:
        self.versions = [BASE]

    @property
    def distinct(self) -> list[int]:
        return self.versions

    def alike(self, version: int) -> int:
        return version

    def add(self, adapter: Adapter) -> None:
        self.versions.append(adapter.version)

    def forget(self, version: int) -> None:
        self.versions.remove(version)


class Kept(Holding):
    """An oracle that computes nothing twice. It stands in for a judge's oracle, one case after the other."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self.whole = oracle
        self.vocab_size = oracle.vocab_size
        self._found: dict[tuple[Any, ...], Any] = {}

    def score(self, candidate: Candidate, samples: Sequence[Sample]) -> list[Scores]:
        missing = [s for s in dict.fromkeys(samples) if (candidate, s) not in self._found]
        for sample, scores in zip(missing, self.whole.score(candidate, missing), strict=True):
            self._found[candidate, sample] = scores
        return [self._found[candidate, s] for s in samples]

    def sample(self, version: int, prompts: Sequence[tuple[int, ...]], *how: Any) -> list[Sample]:
        key = (version, tuple(prompts), *how[:2])
        if key not in self._found:
            self._found[key] = self.whole.sample(version, prompts, *how)
        found: list[Sample] = self._found[key]
        return found

    def noise(self, version: int, samples: Sequence[Sample]) -> list[torch.Tensor]:
        key = (version, tuple(samples))
        if key not in self._found:
            self._found[key] = self.whole.noise(version, samples)
        found: list[torch.Tensor] = self._found[key]
        return found


class Record:
    """A right record: adapter requests, then after each update requests side by side with base requests; and
    one request that the last update overtakes."""

    def __init__(self, oracle: Kept, adapters: dict[int, Adapter], history: History) -> None:
        self.oracle = oracle
        self.adapters = adapters
        self.history = history

    def judge(self, history: History) -> dict[str, Result]:
        for version in self.oracle.versions[1:]:
            self.oracle.forget(version)
        load = lambda update: self.adapters[update.version]  # noqa: E731
        policy = Capability.CONTINUE_MIXED
        found = judge_history(history, self.oracle, load, in_flight=policy)  # type: ignore[arg-type]
        return {result.clause: result for result in found}

    def answer(self, request: GenerateRequest, candidate: Candidate) -> Completion:
        oracle = self.oracle.whole
        if isinstance(candidate, Mixed):
            sample = toy.greedy(oracle, candidate, request)
        else:
            generator = torch.Generator().manual_seed(request.prompt_token_ids[0])
            how = ([request.prompt_token_ids], request.max_tokens, request.temperature, generator)
            sample = oracle.sample(candidate, *how)[0]
        scores = oracle.score(candidate, [sample])[0]
        return Completion(sample.tokens, tuple(scores.logprobs.tolist()))


@pytest.fixture(scope="module")
def record(base_oracle: Oracle) -> Iterator[Record]:
    generator = torch.Generator().manual_seed(5)
    adapters = {v: make_adapter(base_oracle.layers(), v, generator, strength=0.5) for v in VERSIONS}
    for adapter in adapters.values():
        base_oracle.add(adapter)
    made = Record(Kept(base_oracle), adapters, History())
    history = made.history

    def request(n_tokens: int = TOKENS, adapter: bool = True, temperature: float = 0.0) -> GenerateRequest:
        prompt = torch.randint(0, made.oracle.vocab_size, (PROMPT,), generator=generator).tolist()
        return GenerateRequest(tuple(prompt), n_tokens, temperature=temperature, adapter=adapter)

    def ask(served: int) -> None:
        requests = [request(temperature=index % 2) for index in range(EACH)]
        if served != BASE:  # before the first update nothing is claimed of them
            requests += [request(adapter=False, temperature=index % 2) for index in range(EACH)]
        started = [history.request_started(r) for r in requests]
        for r, tick in zip(requests, started, strict=True):
            history.request_ended(r, tick, made.answer(r, served if r.adapter else BASE))

    ask(BASE)
    for version in VERSIONS:
        if version == VERSIONS[-1]:
            long = request(3 * TOKENS)
            tick = history.request_started(long)
        history.update_ended(history.update_started(adapters[version]))
        if version == VERSIONS[-1]:
            history.request_ended(long, tick, made.answer(long, Mixed(((2, 0), (3, PROMPT + 20)))))
        ask(version)
        alone = request(adapter=False)
        history.request_ended(alone, history.request_started(alone), made.answer(alone, BASE))
    history.close()
    yield made
    for version in VERSIONS:
        base_oracle.forget(version)


ALWAYS = {"SYNC-001", "SYNC-002", "SYNC-003", "BASE-001", "BASE-002", "FLIGHT-002"}


def test_the_record_as_it_is_passes(record: Record):
    found = record.judge(record.history)
    passed = {clause for clause, result in found.items() if result.outcome == Outcome.PASS}
    assert passed == ALWAYS | {"FLIGHT-001"}, found


def judged(record: Record, history: History) -> set[str]:
    """The clauses that fail; whatever the change, none may lack power."""
    found = record.judge(history)
    assert not [r for r in found.values() if r.outcome == Outcome.ERROR], found
    return {clause for clause, result in found.items() if result.outcome == Outcome.FAIL}


def changed(history: History, *changes: tuple[int, Exchange]) -> History:
    """A copy with these exchanges in place of others."""
    exchanges = list(history.exchanges)
    for index, exchange in changes:
        exchanges[index] = exchange
    return replace(history, exchanges=exchanges, updates=[replace(u) for u in history.updates])


def answered(e: Exchange, **fields: Any) -> Exchange:
    return replace(e, completion=replace(e.completion, **fields))


INDEX = st.integers(0, 2**16)

CASES = settings(max_examples=min(settings().max_examples, 500))
"""A case takes some 15 ms, since a whole history is judged: with the long profile, about a minute in all."""


def whole(record: Record, index: int) -> int:
    """One of the exchanges that no update overtook."""
    some = [i for i, e in enumerate(record.history.exchanges) if len(e.completion.token_ids) == TOKENS]
    return some[index % len(some)]


@CASES
@given(one=INDEX, two=INDEX)
def test_completions_swapped_between_requests_fail(record: Record, one: int, two: int):
    i, j = whole(record, one), whole(record, two)
    a, b = record.history.exchanges[i], record.history.exchanges[j]
    history = changed(
        record.history, (i, replace(a, completion=b.completion)), (j, replace(b, completion=a.completion))
    )
    assert bool(judged(record, history)) == (i != j)


@CASES
@given(which=INDEX, token=st.integers(0, TOKENS - 1), other=st.integers(1, 3))
def test_a_token_that_was_changed_fails(record: Record, which: int, token: int, other: int):
    i = whole(record, which)
    e = record.history.exchanges[i]
    tokens = list(e.completion.token_ids)
    tokens[token] = (tokens[token] + other) % record.oracle.vocab_size
    assert judged(record, changed(record.history, (i, answered(e, token_ids=tuple(tokens)))))


@CASES
@given(which=INDEX, version=st.sampled_from([BASE, *VERSIONS]))
def test_logprobs_of_another_version_fail_and_are_named(record: Record, which: int, version: int):
    i = whole(record, which)
    e = record.history.exchanges[i]
    (served,) = record.history.served(e).at_start
    sample = Sample(e.request.prompt_token_ids, e.completion.token_ids, e.request.temperature)
    logprobs = tuple(record.oracle.score(version, [sample])[0].logprobs.tolist())
    found = record.judge(changed(record.history, (i, answered(e, logprobs=logprobs))))
    failed = [r for r in found.values() if r.outcome == Outcome.FAIL]
    assert bool(failed) == (version != served)
    for result in failed:
        if version > served + 1:  # attribution looks no further ahead than the next update
            continue
        whose = "the base model" if version == BASE else f"version {version}"
        assert f"these logprobs are those of {whose}" in result.message
        assert [item["ended"] for item in result.witness] == [e.ended]


@CASES
@given(which=INDEX, off=st.floats(-1, 1), token=st.integers(0, TOKENS - 1))
def test_a_shifted_logprob_fails_beyond_the_tolerance_and_no_sooner(
    record: Record, which: int, off: float, token: int
):
    i = whole(record, which)
    e = record.history.exchanges[i]
    assert e.completion.logprobs is not None
    logprobs = list(e.completion.logprobs)
    logprobs[token] += off
    failed = judged(record, changed(record.history, (i, answered(e, logprobs=tuple(logprobs)))))
    if abs(off) > 2e-3:
        assert failed
    if abs(off) < 5e-5:  # half of what is always allowed
        assert not failed


@CASES
@given(which=INDEX, factor=st.sampled_from([0.5, 0.9, 0.98, 1.02, 1.1, 2.0]))
def test_scaled_logprobs_fail(record: Record, which: int, factor: float):
    """As those after temperature would be, about."""
    i = whole(record, which)
    e = record.history.exchanges[i]
    assert e.completion.logprobs is not None
    off = max(abs((factor - 1) * value) for value in e.completion.logprobs)
    logprobs = tuple(factor * value for value in e.completion.logprobs)
    failed = judged(record, changed(record.history, (i, answered(e, logprobs=logprobs))))
    assert bool(failed) or off < 2e-3


@CASES
@given(which=st.integers(0, 2), version=st.sampled_from(VERSIONS))
def test_an_update_called_by_another_version_fails(record: Record, which: int, version: int):
    """What is relabelled is the adapter that was sent; the record says that it was another."""
    history = changed(record.history)
    was = history.updates[which].version
    history.updates[which].version = version
    history.updates[which].digest = record.adapters[version].digest()
    found = {clause for clause, r in record.judge(history).items() if r.outcome == Outcome.FAIL}
    assert bool(found) == (version != was)


@CASES
@given(which=st.integers(0, 2))
def test_an_update_that_was_dropped_fails(record: Record, which: int):
    history = changed(record.history)
    del history.updates[which]
    assert {c for c, r in record.judge(history).items() if r.outcome == Outcome.FAIL}


@CASES
@given(which=st.integers(0, 2), later=INDEX)
def test_an_update_that_came_later_than_the_record_says_fails(record: Record, which: int, later: int):
    """The update is moved behind a request that it had served."""
    history = changed(record.history)
    update = history.updates[which]
    after = next((u.started for u in history.updates[which + 1 :]), 10**6)
    served = [e for e in history.exchanges if e.request.adapter and update.ended < e.started < after]
    e = served[later % len(served)]
    update.started, update.ended = e.ended + 1, e.ended + 1  # equal places: nothing lies between
    found = record.judge(history)
    assert {c for c, r in found.items() if r.outcome == Outcome.FAIL}


@CASES
@given(seed=INDEX)
def test_the_order_of_lines_that_do_not_depend_on_each_other_is_none_of_the_judges(record: Record, seed: int):
    """Between two updates requests may start and end in any order."""
    shuffle = random.Random(seed)
    history = changed(record.history)
    edges = sorted(tick for u in history.updates for tick in (u.started, u.ended or 0))
    settled = [e for e in history.exchanges if not record.history.served(e).later]
    ticks: dict[int, list[int]] = {}
    for e in settled:
        ticks.setdefault(sum(edge < e.started for edge in edges), []).extend((e.started, e.ended))
    for some in ticks.values():
        shuffle.shuffle(some)
    moved = []
    for e in settled:
        some = ticks[sum(edge < e.started for edge in edges)]
        started, ended = sorted((some.pop(), some.pop()))
        moved.append(replace(e, started=started, ended=ended))
    history.exchanges = [e for e in history.exchanges if e not in settled] + moved
    shuffle.shuffle(history.exchanges)
    assert not judged(record, history)


@CASES
@given(places=st.lists(INDEX, min_size=3, max_size=3, unique=True))
def test_what_versions_are_called_is_none_of_the_judges(record: Record, places: list[int]):
    """Any numbers do that grow with the updates."""
    names = dict(zip(VERSIONS, (1 + place for place in sorted(places)), strict=True))
    history = changed(record.history)
    for update in history.updates:
        update.version = names[update.version]
    renamed = Record(Renamed(record.oracle, names), {}, history)  # type: ignore[arg-type]
    renamed.adapters = {names[v]: replace(a, version=names[v]) for v, a in record.adapters.items()}
    assert not judged(renamed, history)


class Renamed(Holding):
    """The same oracle, whose versions have other numbers."""

    def __init__(self, oracle: Kept, names: dict[int, int]) -> None:
        super().__init__()
        self._oracle = oracle
        self._old = {new: old for old, new in names.items()} | {BASE: BASE}
        self.vocab_size = oracle.vocab_size

    def score(self, candidate: Candidate, samples: Sequence[Sample]) -> list[Scores]:
        if isinstance(candidate, Mixed):
            parts = tuple((self._old[version], first) for version, first in candidate.parts)
            return self._oracle.score(Mixed(parts, candidate.recomputed), samples)
        return self._oracle.score(self._old[candidate], samples)

    def sample(self, version: int, *how: Any) -> list[Sample]:
        return self._oracle.sample(self._old[version], *how)

    def noise(self, version: int, samples: Sequence[Sample]) -> list[torch.Tensor]:
        return self._oracle.noise(self._old[version], samples)
