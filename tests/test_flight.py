"""The mix of versions behind a completion is found from its logprobs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeAdapter
from rollproof.candidates import BASE, Candidate, Mixed
from rollproof.flight import Answer, admitted, policy
from rollproof.history import Served
from rollproof.judge import Scored, Tolerance, judge
from rollproof.models import make_adapter
from rollproof.oracle import Oracle, Sample
from rollproof.protocol import Capability

PROMPT, TOKENS = 24, 32
SAMPLE = Sample(tuple(range(7, 7 + PROMPT)), tuple(range(100, 100 + TOKENS)))
FINE = Tolerance(completion=1e-4, token=1e-4, noise=1e-6, samples=1000)
# As measured for bfloat16: the largest error of one token is far above what is usual.
COARSE = Tolerance(completion=0.24, token=1.7, noise=0.03, samples=1000)
SERVED = Served((1,), (2, 3))


@pytest.fixture(scope="module")
def oracle(base_oracle: Oracle) -> Iterator[Oracle]:
    for version in (1, 2, 3):
        generator = torch.Generator().manual_seed(version)
        base_oracle.add(make_adapter(base_oracle.layers(), version, generator, strength=0.5))
    yield base_oracle
    for version in (1, 2, 3):
        base_oracle.forget(version)


def observed(oracle: Oracle, truth: Candidate, noise: float = 0.0) -> torch.Tensor:
    exact = oracle.score(truth, [SAMPLE])[0].logprobs
    return exact + noise * torch.randn(TOKENS, generator=torch.Generator().manual_seed(0))


def found(
    oracle: Oracle, logprobs: torch.Tensor, tolerance: Tolerance = FINE, served: Served = SERVED
) -> list[Candidate]:
    answer = Answer(SAMPLE, logprobs, served)
    return admitted([answer], Capability.CONTINUE_MIXED, oracle, tolerance)[0]


def at(*switches: tuple[int, int], anew: tuple[int, ...] = ()) -> Mixed:
    """Version 1, then each version from its token on; those that begin at ``anew`` on KV computed anew."""
    parts = ((1, 0), *((version, PROMPT - 1 + token) for version, token in switches))
    return Mixed(parts, tuple(PROMPT - 1 + token for token in anew))


MIXES = [
    at((2, 9)),
    at((2, 0)),
    at((2, 1)),
    at((2, TOKENS - 1)),
    at((3, 17)),
    at((2, 5), (3, 20)),
    at((2, 5), (3, 8)),
    at((2, 9), anew=(9,)),
    at((2, 9), (3, 15), anew=(9, 15)),
    # Weights replaced first, and the KV given up some tokens later: a preemption, or a cache that is reset.
    at((2, 9), (2, 14), anew=(14,)),
    at((2, 9), (2, 14), (3, 20), (3, 24), anew=(14, 24)),
    Mixed(((1, 0), (2, 11))),
    Mixed(((2, 0), (3, PROMPT + 4))),
]


# Twice two switches within a token or two: float32 tells them apart, half precision doesn't always.
CLOSE = at((2, 9), (2, 10), (3, 20), (3, 22), anew=(10, 22))


@pytest.mark.parametrize("truth", [*MIXES, CLOSE], ids=str)
def test_a_mix_is_found_to_the_token(oracle: Oracle, truth: Mixed):
    assert found(oracle, observed(oracle, truth))[-1] == truth


@pytest.mark.parametrize("truth", MIXES, ids=str)
def test_a_mix_is_found_under_the_noise_of_half_precision(oracle: Oracle, truth: Mixed):
    logprobs = observed(oracle, truth, noise=0.03)
    best = found(oracle, logprobs, COARSE)[-1]
    assert (oracle.score(best, [SAMPLE])[0].logprobs - logprobs).abs().max() < 0.24


@given(token=st.integers(0, TOKENS - 1), switch=st.integers(1, TOKENS - 1), wrong=st.sampled_from([BASE, 3]))
def test_one_token_of_another_version_fails(oracle: Oracle, token: int, switch: int, wrong: int):
    served = Served((1,), (2,))
    truth = at((2, switch))
    logprobs = observed(oracle, truth)
    other = oracle.score(wrong, [SAMPLE])[0].logprobs[token]
    logprobs[token] = other
    candidates = found(oracle, logprobs, served=served)
    scores = {c: oracle.score(c, [SAMPLE])[0] for c in candidates}
    item = Scored(SAMPLE.tokens, 1.0, logprobs, candidates, scores, PROMPT)
    off = (oracle.score(truth, [SAMPLE])[0].logprobs[token] - other).abs()
    failure = judge([item], FINE).failure
    assert ("expected version" in failure) == bool(off > FINE.token)


def test_what_the_policy_does_not_admit_is_no_candidate(oracle: Oracle):
    logprobs = observed(oracle, at((2, 9)))
    for declared, expected in (
        (Capability.FINISH_ON_OLD, [1]),
        (Capability.ABORT_IN_FLIGHT, [1]),
        (Capability.RESTART, [1, 2, 3]),
        (None, [1, 2, 3]),
    ):
        assert admitted([Answer(SAMPLE, logprobs, SERVED)], declared, oracle, FINE) == [expected]


def test_a_request_that_no_update_overtook_has_one_version(oracle: Oracle, adapter: MakeAdapter):
    assert found(oracle, observed(oracle, 1), served=Served((1,), ())) == [1]


def test_an_update_that_ran_when_the_request_began_may_come_in_the_middle_of_it(oracle: Oracle):
    logprobs = observed(oracle, at((2, 9)))
    assert found(oracle, logprobs, served=Served((1, 2), ()))[-1] == at((2, 9))


def test_a_boundary_in_a_long_prompt_is_found(oracle: Oracle):
    prompt = tuple(torch.randint(0, 1000, (300,), generator=torch.Generator().manual_seed(1)).tolist())
    sample = replace(SAMPLE, prompt=prompt)
    truth = Mixed(((1, 0), (2, 202)))
    logprobs = oracle.score(truth, [sample])[0].logprobs
    answer = Answer(sample, logprobs, Served((1,), (2,)))
    assert admitted([answer], Capability.CONTINUE_MIXED, oracle, FINE)[0][-1] == truth


def test_one_policy_is_declared_or_none():
    assert policy(frozenset({Capability.RESTART, Capability.BASE})) == Capability.RESTART
    assert policy(frozenset({Capability.RESTART, Capability.CONTINUE_MIXED})) is None
    assert policy(frozenset()) is None
