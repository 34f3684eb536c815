"""The judge: its false-alarm bound holds, and it sees what it claims to see."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollproof.candidates import BASE
from rollproof.judge import ERROR_RATE, FLOOR, MARGIN, Scored, Tolerance, judge, surprise_log_bound
from rollproof.oracle import Sample, Scores, _reduce

VOCAB, TOKENS = 50, 16
TIGHT = Tolerance(completion=1e-3, token=1e-3, noise=1e-4, samples=1000)


def scores(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 0.0) -> Scores:
    return _reduce(logits, Sample((0,), tuple(tokens.tolist()), temperature))


def scene(seed: int, temperature: float = 0.0, served: int = 2, off: float = 0.0) -> Scored:
    """A completion that version ``served`` of {base, 1, 2} made, where version 2 is expected."""
    generator = torch.Generator().manual_seed(seed)
    logits = {version: 3 * torch.randn(TOKENS, VOCAB, generator=generator) for version in (BASE, 1, 2)}
    if temperature == 0:
        tokens = logits[served].argmax(-1)
    else:
        tokens = torch.multinomial((logits[served] / temperature).softmax(-1), 1, generator=generator)[:, 0]
    by_version = {version: scores(found, tokens, temperature) for version, found in logits.items()}
    observed = by_version[served].logprobs + off
    return Scored(tuple(tokens.tolist()), temperature, observed, [2], by_version)


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]))
def test_the_right_version_passes(seed: int, temperature: float):
    verdict = judge([scene(seed, temperature)], TIGHT)
    assert verdict.failure == ""
    assert verdict.power() > 100


@given(seeds=st.lists(st.integers(0, 2**32), min_size=2, max_size=4, unique=True), alike=st.data())
def test_power_is_that_of_the_completions_that_have_to_tell(seeds: list[int], alike: st.DataObject):
    scenes = [scene(seed) for seed in seeds]
    blind = alike.draw(st.integers(1, len(scenes) - 1))
    for item in scenes[:blind]:
        item.scores[1] = item.scores[2]  # nothing tells the two versions apart on these tokens
    verdict = judge(scenes, TIGHT)
    assert verdict.power() == 0
    assert verdict.power(len(scenes) - blind) > 100
    assert verdict.power(len(scenes) - blind + 1) == 0


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    served=st.sampled_from([BASE, 1]),
)
def test_another_version_fails_and_is_named(seed: int, temperature: float, served: int):
    failure = judge([scene(seed, temperature, served)], TIGHT).failure
    assert "expected version 2" in failure
    assert f"those of {'the base model' if served == BASE else 'version 1'}" in failure


@given(seed=st.integers(0, 2**32), off=st.floats(2e-3, 1.0), sign=st.sampled_from([-1, 1]))
def test_logprobs_beyond_the_tolerance_fail(seed: int, off: float, sign: int):
    assert "expected version 2" in judge([scene(seed, off=off * sign)], TIGHT).failure


@given(seed=st.integers(0, 2**32), off=st.floats(-9e-4, 9e-4))
def test_logprobs_within_the_tolerance_pass(seed: int, off: float):
    assert judge([scene(seed, off=off)], TIGHT).failure == ""


def test_one_wrong_completion_among_many_fails():
    items = [scene(seed) for seed in range(8)]
    items[5] = scene(5, served=BASE)
    assert judge(items, TIGHT).failure.startswith("completion 6 of 8: expected version 2")


def test_one_wrong_token_fails_though_the_mean_is_small():
    item = scene(0)
    assert item.observed is not None
    wide = Tolerance(completion=1.0, token=1e-3, noise=1e-4, samples=1000)
    item.observed[7] += 0.01
    assert "at token 7" in judge([item], wide).failure


def test_logprobs_that_are_not_finite_fail():
    item = scene(0)
    assert item.observed is not None
    item.observed[3] = math.nan
    assert "not all finite" in judge([item], TIGHT).failure


def test_sampled_tokens_of_another_version_fail_without_logprobs():
    items = [
        Scored(item.tokens, item.temperature, None, item.admitted, item.scores)
        for item in (scene(seed, 1.0, served=1) for seed in range(4))
    ]
    failure = judge(items, TIGHT).failure
    assert "expected tokens sampled from version 2" in failure
    assert "they look sampled from version 1" in failure


def test_greedy_tokens_sold_as_sampled_are_too_dull():
    items = []
    for seed in range(16):
        item = scene(seed)
        generator = torch.Generator().manual_seed(seed)
        for _ in (BASE, 1):
            torch.randn(TOKENS, VOCAB, generator=generator)
        logits = 3 * torch.randn(TOKENS, VOCAB, generator=generator)
        found = scores(logits, torch.tensor(item.tokens), 1.0)
        items.append(Scored(item.tokens, 1.0, found.logprobs, [2], {2: found}))
    assert "expected tokens sampled from version 2" in judge(items, TIGHT).failure


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_surprise_bound_is_one(temperature: float):
    """Over many draws, bounds below q come up at most a fraction q of the time."""
    generator = torch.Generator().manual_seed(0)
    bounds = []
    for _ in range(2000):
        logits = 3 * torch.randn(TOKENS, VOCAB, generator=generator)
        tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        bounds.append(surprise_log_bound([scores(logits, tokens, temperature)]))
    found = torch.tensor(bounds)
    for q in (0.5, 0.1, 0.01):
        assert (found < math.log(q)).double().mean() <= q
    assert found.min() > math.log(ERROR_RATE)


@given(st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=40))
def test_a_tolerance_covers_the_noise_it_comes_from(values: list[float]):
    noise = torch.tensor(values)[None]
    tolerance = Tolerance.from_noise([noise])
    assert tolerance.token >= max(FLOOR, MARGIN * noise.abs().max().item()) * (1 - 1e-6)
    assert tolerance.completion >= FLOOR
    assert tolerance.samples == len(values)


@given(seed=st.integers(0, 2**32), token=st.integers(0, TOKENS - 1), off=st.floats(2e-3, 1.0))
def test_the_witness_is_the_token_that_is_off(seed: int, token: int, off: float):
    items = [scene(seed), scene(seed + 1)]
    assert items[1].observed is not None
    items[1].observed[token] += off
    assert judge(items, TIGHT).witness == ((1, token),)


def test_the_witness_is_the_token_by_which_the_rest_no_longer_matters():
    """Each token is within its own bound; half of the completion's allowance is spent on each of two."""
    wide = Tolerance(completion=1e-3, token=1.0, noise=1e-4, samples=1000)
    item = scene(0)
    assert item.observed is not None
    item.observed[[3, 9, 12]] += 0.8e-3 * math.sqrt(TOKENS)
    assert judge([item], wide).witness == ((0, 9),)


def test_the_witness_is_the_shortest_of_those_that_fail():
    items = [scene(seed) for seed in range(3)]
    for item, token in zip(items, (9, 4, 7), strict=True):
        assert item.observed is not None
        item.observed[token] += 1.0
    verdict = judge(items, TIGHT)
    assert verdict.failure.startswith("completion 1 of 3")
    assert verdict.witness == ((1, 4),)


@pytest.mark.parametrize("served", [BASE, 1])
def test_the_witness_of_greedy_tokens_is_the_first_wrong_one(served: int):
    item = scene(0, served=served)
    right = Scored(item.tokens, 0.0, None, [2], item.scores)
    wrong = int((right.scores[2].top_ids != torch.tensor(item.tokens)).nonzero()[0])
    assert judge([right], TIGHT).witness == ((0, wrong),)


def test_the_witness_of_surprising_tokens_is_the_fewest_completions_that_surprise():
    """Any fewer of them would pass, alone or together."""
    served = [2, 1, 2, 1, 1, 2, 1, 2]
    items = [
        Scored(item.tokens, item.temperature, None, item.admitted, item.scores)
        for item in (scene(seed, 1.0, served=version) for seed, version in enumerate(served))
    ]
    verdict = judge(items, TIGHT)
    chosen = [index for index, _ in verdict.witness]
    assert {served[index] for index in chosen} == {1}
    assert all(token is None for _, token in verdict.witness)
    assert judge([items[index] for index in chosen], TIGHT).failure
    for few in itertools.combinations(items, len(chosen) - 1):
        assert not judge(few, TIGHT).failure
