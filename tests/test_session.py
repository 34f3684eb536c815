"""What clauses are written with: prompts that tell, and the versions a claim is set against. No engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollproof.calibrate import LETTERS, fresh_prompts
from rollproof.history import Exchange, History
from rollproof.judge import Tolerance, Verdict, rms
from rollproof.oracle import BASE, Oracle
from rollproof.outcome import UnderpoweredError
from rollproof.protocol import Adapter, GenerateRequest
from rollproof.session import MAX_TOKENS, PROMPT_TOKENS, PROMPTS, Session
from rollproof.verify import RIVALS, Verifier

TOKENS = 4


@pytest.fixture
def session(base_oracle: Oracle, adapter: Any, spec: Any) -> Iterator[Session]:
    """A session after an update to version 1, which the oracle knows."""
    base_oracle.add(adapter(1))
    updates = [SimpleNamespace(version=1, error=None), SimpleNamespace(version=2, error="refused")]
    subject = SimpleNamespace(history=SimpleNamespace(updates=updates), capabilities=frozenset(), spec=spec)
    yield Session(subject, base_oracle, SimpleNamespace())  # type: ignore[arg-type]
    for version in base_oracle.versions[1:]:
        base_oracle.forget(version)


def least(oracle: Oracle, prompt: tuple[int, ...], right: int, wrong: Sequence[int]) -> float:
    samples = oracle.sample(right, [prompt], TOKENS)
    own, *others = [oracle.score(version, samples)[0].logprobs for version in (right, *wrong)]
    return min(rms(own - other).item() for other in others)


def test_prompts_are_fresh_and_repeat_their_tokens(session: Session):
    session.reseed(0, "prompts")
    first, second = session.prompts(3, 400), session.prompts(3, 400)
    assert len({*first, *second}) == 6
    assert all(len(prompt) == 400 and len(set(prompt)) <= LETTERS for prompt in (*first, *second))
    session.reseed(0, "prompts")
    assert session.prompts(3, 400) == first == fresh_prompts(session.oracle, 3, 400, generator(session, 0))


def generator(session: Session, seed: int) -> Any:
    session.reseed(seed, "prompts")
    return session._generator


def test_prompts_are_chosen_by_how_far_the_nearest_wrong_candidate_is(session: Session, adapter: Any):
    session.oracle.add(adapter(2))
    session.reseed(0, "telling")
    chosen = session.telling(3, PROMPT_TOKENS, TOKENS, 1, [BASE, 2])
    session.reseed(0, "telling")
    every = {prompt: least(session.oracle, prompt, 1, [BASE, 2]) for prompt in session.prompts(32)}
    ranked = sorted(every, key=lambda prompt: every[prompt], reverse=True)
    assert set(chosen) <= set(every)
    # Batches of other sizes round otherwise, so near ties may fall either way.
    assert min(every[prompt] for prompt in chosen) >= 0.99 * every[ranked[2]]


async def test_a_claim_chooses_its_prompts_once_any_were_not_enough(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    asked: list[list[GenerateRequest]] = []

    async def ask(requests: Sequence[GenerateRequest]) -> list[Exchange]:
        asked.append(list(requests))
        return []

    def verify(*_: Any, **__: Any) -> str:
        if len(asked) == 1:
            raise UnderpoweredError("underpowered")
        return "told"

    monkeypatch.setattr(session, "ask", ask)
    monkeypatch.setattr(session, "verify", verify)
    session.reseed(0, "claim")
    assert await session.claim(True) == "told"
    session.reseed(0, "claim")
    any_prompts = session.prompts()
    session.requests(any_prompts, MAX_TOKENS)  # which draws its seeds from the same generator
    chosen = session.telling(PROMPTS, PROMPT_TOKENS, 2 * MAX_TOKENS, 1, [BASE])
    assert [[r.prompt_token_ids for r in requests] for requests in asked] == [any_prompts, chosen]
    assert [requests[0].max_tokens for requests in asked] == [MAX_TOKENS, 2 * MAX_TOKENS]


@pytest.mark.parametrize(("adapter_asked", "right", "wrong"), [(True, 1, BASE), (False, BASE, 1)])
async def test_a_claim_tells_what_serves_from_the_base_model(
    session: Session, monkeypatch: pytest.MonkeyPatch, adapter_asked: bool, right: int, wrong: int
):
    told = (PROMPTS, PROMPT_TOKENS, TOKENS, right, [wrong])
    monkeypatch.setattr(session, "telling", lambda *given: given)
    assert session._prompts_for(TOKENS, adapter_asked) == told, "the update that was refused serves nothing"


@pytest.mark.parametrize("updates", [[], [1, 3]])
def test_prompts_are_any_where_no_version_serves_that_the_oracle_knows(
    session: Session, monkeypatch: pytest.MonkeyPatch, updates: list[int]
):
    session.subject.history.updates[:] = [SimpleNamespace(version=v, error=None) for v in updates]
    monkeypatch.delattr(Session, "telling")
    for asked in (True, False):
        assert len(session._prompts_for(TOKENS, asked)) == PROMPTS


@pytest.mark.parametrize(
    ("effects", "most", "tried", "chosen"),
    [
        ([31, 90, 90, 90], math.inf, [0.5], 0.5),
        ([3, 31, 90, 90], math.inf, [0.5, 1], 1),
        ([3, 29, 15, 7], math.inf, [0.5, 1, 2, 4], 1),
        ([3, 9, 15, 90], 1.5, [0.5, 1, 1.5], 1.5),
        ([3, 90, 90, 90], 0.2, [0.2], 0.2),
    ],
)
def test_an_adapter_in_few_modules_is_as_strong_as_it_has_to_be(
    session: Session, adapter: Any, effects: list[float], most: float, tried: list[float], chosen: float
):
    """An effect of 20 tolerances is enough; the version's own noise is half as wide again as the run's."""
    made: list[float] = []
    noise = Tolerance(1.5, 1.5, 0.1, 8)
    session.calibration = SimpleNamespace(  # type: ignore[assignment]
        strength=0.5,
        tolerance=lambda size: Tolerance(1.0, 1.0, 0.1, 8),
        measure=lambda one, size: (replace(noise, samples=size[1]), effects[len(made) - 1]),
    )

    def make(strength: float) -> Adapter:
        made.append(strength)
        return adapter(10 + len(made), strength=strength)

    found = session._strong(make, most)
    assert made == tried
    assert made[found.version - 11] == chosen
    for n_tokens in (MAX_TOKENS, 4 * MAX_TOKENS):
        own = session.verifier._own[found.version]((PROMPT_TOKENS, n_tokens))
        assert own == replace(noise, samples=n_tokens), "measured for the size that is asked"


@pytest.mark.parametrize(("telling", "told"), [(None, "3 tolerances"), (3, "3 tolerances"), (2, "7 tol")])
def test_as_many_answers_as_are_said_have_to_tell(
    session: Session, monkeypatch: pytest.MonkeyPatch, telling: int | None, told: str
):
    verdict = Verdict("", 0.0, ({BASE: 7.0}, {BASE: 30.0}, {BASE: 3.0}))
    found = verdict, [], Tolerance(1.0, 1.0, 0.1, 8)
    monkeypatch.setattr(session.verifier, "weighed", lambda *_: found)
    with pytest.raises(UnderpoweredError, match=f"nearest wrong candidate is {told}"):
        session.verify([], telling=telling)
    assert "the nearest wrong candidate is 30 tolerances away" in session.verify([], telling=1)


def test_weak_versions_are_rivals_for_a_while_only(base_oracle: Oracle, adapter: Any):
    verifier = Verifier(base_oracle, SimpleNamespace(), History(), None)  # type: ignore[arg-type]
    try:
        for version in range(1, 10):
            base_oracle.add(adapter(version))
            if version in (4, 8, 9):
                verifier.learn(version, lambda _: None)  # type: ignore[arg-type,return-value]
        assert verifier._latest() == [5, 6, 7, 8, 9]
        base_oracle.add(adapter(10))
        assert verifier._latest() == [5, 6, 7, 9, 10]
        assert len(verifier._latest()) == RIVALS + 1
    finally:
        for version in base_oracle.versions[1:]:
            base_oracle.forget(version)
