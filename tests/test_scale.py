"""A scale that is off by little shows over many tokens, and noise doesn't look like one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import faulty
from faults import scaled
from rollproof import Outcome, Settings, check_rollout
from rollproof.bench import Bench
from rollproof.judge import MARGIN, Scored
from rollproof.models import make_adapter
from rollproof.oracle import Oracle, Sample
from rollproof.outcome import FailureError, UnderpoweredError
from rollproof.scale import (
    ANY,
    DEVIATIONS,
    FAULT,
    FLOOR,
    allowance,
    claimed,
    directions,
    judged,
    noise_along,
    relative_errors,
)
from sensitivity import Row, alone

DEVIATION = 0.002
OPTIONS = [
    {"lora_alpha": 1},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3.0, "down_proj": 40}},
]
SCALES = [1, 1, 3]


@pytest.fixture(scope="module", params=zip(OPTIONS, SCALES, strict=True), ids=str)
def scene(request: pytest.FixtureRequest, base_oracle: Oracle) -> Iterator[tuple]:
    """The oracle, an adapter that it knows as version 1, tokens of it, and how many scales it has."""
    options, scales = request.param
    generator = torch.Generator().manual_seed(0)
    adapter = make_adapter(base_oracle.layers(), 1, generator, strength=0.5, **options)
    base_oracle.add(adapter)
    prompts = [tuple(row) for row in torch.randint(0, 1000, (4, 24), generator=generator).tolist()]
    yield base_oracle, adapter, base_oracle.sample(1, prompts, 16, 1.0, generator), scales
    for version in base_oracle.versions[1:]:
        base_oracle.forget(version)


def scored(oracle: Oracle, samples: list[Sample], served: int, admitted: list[int]) -> list[Scored]:
    """What the verifier makes of completions whose logprobs are those of version ``served``."""
    return [
        Scored(
            s.tokens,
            1.0,
            oracle.score(served, [s])[0].logprobs,
            admitted,
            {v: oracle.score(v, [s])[0] for v in admitted},
        )
        for s in samples
    ]


def silent(version: int) -> float:
    return 0.0


@pytest.mark.parametrize("error", [-0.02, -0.001, 0.001, 0.02])
def test_an_error_of_every_scale_is_found_at_its_size(scene: tuple, error: float):
    oracle, adapter, samples, scales = scene
    oracle.add(replace(scaled(adapter, None, error), version=2))
    truth, found = (torch.cat([s.logprobs for s in oracle.score(v, samples)]) for v in (1, 2))
    oracle.forget(2)
    errors, _ = relative_errors(directions(oracle, 1, samples)[1], found - truth)
    assert errors.tolist() == pytest.approx([error] * scales, rel=0.1)


def test_the_scale_that_is_off_is_the_one_that_is_told(base_oracle: Oracle):
    generator = torch.Generator().manual_seed(0)
    adapter = make_adapter(base_oracle.layers(), 1, generator, strength=0.5, **OPTIONS[2])
    base_oracle.add(adapter)
    base_oracle.add(replace(scaled(adapter, None, -0.02, of=".q_proj."), version=2))
    prompts = [tuple(row) for row in torch.randint(0, 1000, (4, 24), generator=generator).tolist()]
    samples = base_oracle.sample(1, prompts, 16, 1.0, generator)
    with pytest.raises(FailureError, match=r"the scale of q_proj that the logprobs show is 0\.980\d of"):
        claimed(base_oracle, silent, samples, scored(base_oracle, samples, 2, [1]), ANY)
    told = claimed(base_oracle, silent, samples, scored(base_oracle, samples, 1, [1]), ANY)
    for version in (1, 2):
        base_oracle.forget(version)
    bounds = "(allowed 0.9990 to 1.0010)"
    assert sorted(told.split("; ")) == [
        f"the scale of down_proj is 1.0000 {bounds}",
        f"the scale of gate_proj, k_proj, o_proj, up_proj, v_proj is 1.0000 {bounds}",
        f"the scale of q_proj is 1.0000 {bounds}",
    ]


@given(seed=st.integers(0, 2**32), errors=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=3))
def test_noise_averages_out_of_the_errors_as_far_as_is_said(seed: int, errors: list[float]):
    generator = torch.Generator().manual_seed(seed)
    along = 3 * torch.randn(len(errors), 400, generator=generator)
    noise = 0.03 * torch.randn(400, generator=generator)
    found, spread = relative_errors(along, torch.tensor(errors) @ along + noise)
    assert bool((0.03 * spread < 7e-4).all()), "alone it is 0.03 / (3 * sqrt(400)) = 5e-4"
    assert bool(((found - torch.tensor(errors)).abs() <= 7 * 0.03 * spread).all())


class Noisy(Oracle):
    """An oracle whose noise is known: each token's own, or what the tokens of a completion share."""

    def __init__(self, oracle: Oracle, shared: bool) -> None:
        self.__dict__ |= oracle.__dict__
        self._shared = shared

    def noise(self, version: int, sequences: list[Sample]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = len(sequences), 2, 1 if self._shared else len(sequences[0].tokens)
        found = 0.03 * torch.randn(shape, generator=generator)
        return list(found.expand(-1, -1, len(sequences[0].tokens)))


@pytest.mark.parametrize("shared", [False, True])
def test_noise_counts_as_far_as_it_looks_like_an_error(scene: tuple, shared: bool):
    oracle, _, samples, scales = scene
    noisy = Noisy(oracle, shared)
    along = directions(oracle, 1, samples)[1].reshape(scales, len(samples), -1)
    spread = along.pow(2).sum((1, 2)).rsqrt()
    errors = torch.stack(noisy.noise(1, samples))
    alone = torch.einsum("srt,rwt->srw", along, errors.double()).pow(2).sum(1).sqrt() * spread[:, None]
    assert noise_along(noisy, 1, samples) == pytest.approx(alone.max().item())
    assert 0.015 < noise_along(noisy, 1, samples) < (0.12 if shared else 0.06)


@given(st.floats(0, 0.1), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_allowed_covers_the_noise_and_a_scale_in_the_dtype(deviation: float, dtype: torch.dtype):
    allowed = allowance(dtype, deviation)
    assert allowed >= max(FLOOR, DEVIATIONS * deviation)
    for scale in (0.1, 1.003, 5.657, 63.9):
        assert abs(torch.tensor(scale, dtype=dtype).item() / scale - 1) < allowed


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_scale_within_what_is_allowed_passes_and_one_beyond_it_fails(sign: int):
    told = judged("", sign * 0.0159, DEVIATION, torch.float32, ANY)
    assert told == f"the scale is {1 + sign * 0.0159:.4f} (allowed 0.9840 to 1.0160)"
    with pytest.raises(FailureError, match="the scale of q_proj that the logprobs show is") as failure:
        judged(" of q_proj", sign * 0.0161, DEVIATION, torch.float32, ANY)
    assert f"{1 + sign * 0.0161:.4f} of the adapter's (allowed 0.9840 to 1.0160)" in str(failure.value)


@pytest.mark.parametrize("sure", [FAULT, ANY])
def test_logprobs_that_say_nothing_of_the_scale_are_no_pass(sure: float):
    (error,), (spread,) = relative_errors(torch.zeros(1, 8), torch.zeros(8))
    with pytest.raises(UnderpoweredError, match="no token shows the scale"):
        judged("", float(error), 0.01 * float(spread), torch.float32, sure)


def test_a_deviation_that_is_no_number_is_no_pass():
    for deviation in (math.inf, math.nan):
        with pytest.raises(UnderpoweredError):
            judged("", 0.0, deviation, torch.float32, ANY)


def test_nothing_is_claimed_where_the_fault_could_hide():
    just = FAULT / (DEVIATIONS + MARGIN)
    assert "the scale is 1.0000" in judged("", 0.0, just * 0.99, torch.float32, FAULT)
    with pytest.raises(UnderpoweredError, match="one that is off by 2% has to be sure to show"):
        judged("", 0.0, just * 1.01, torch.float32, FAULT)
    assert "the scale is 1.0000" in judged("", 0.0, just * 1.01, torch.float32, ANY)
    with pytest.raises(FailureError):
        judged("", FAULT, just * 1.01, torch.float32, FAULT)


def test_only_logprobs_of_one_adapter_show_its_scale(scene: tuple):
    oracle, _, samples, _ = scene
    told = "the scale is not claimed, since that takes logprobs of an adapter alone"
    silent_ones = [replace(item, observed=None) for item in scored(oracle, samples, 1, [1])]
    for items in (silent_ones, scored(oracle, samples, 1, [0, 1]), scored(oracle, samples, 0, [0])):
        assert claimed(oracle, silent, samples, items, FAULT) == told
    mixed = scored(oracle, samples[:1], 0, [0]) + scored(oracle, samples[1:], 1, [1])
    assert "is 1.0000 (allowed" in claimed(oracle, silent, samples, mixed, FAULT)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


async def failure(bench: Bench, model: Path, dtype: str, clause: str, fault: str, size: float) -> str:
    """Why the clause alone fails a rollout with this fault."""
    result = await alone(bench, model, dtype, 0, Row(clause, fault, (), ""), size)
    assert result.outcome == Outcome.FAIL, result.message
    return result.message


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 0.02), ("bfloat16", -0.02), ("float16", 0.003)])
async def test_what_no_token_shows_fails_by_all_of_them(
    bench: Bench, model_path: Path, dtype: str, size: float
):
    told = await failure(bench, model_path, dtype, "NUM-003", "scale of rsLoRA", size)
    assert "with {'use_rslora': True}: the scale that the logprobs show is" in told


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("clause", "fault", "size", "told"),
    [
        ("NUM-001", "scale of k_proj", 0.03, "an adapter on k_proj alone: the scale"),
        ("NUM-002", "scale of the last layer", 0.02, "an adapter on layer 1 alone: the scale"),
        ("NUM-005", "scored", 0.03, "prompt_logprobs with the adapter: the scale"),
        ("RANK-001", "scale", 0.015, "an adapter of rank 1: the scale"),
        ("RANK-002", "scale of patterns", 0.05, "the scale of gate_proj"),
        ("NUM-007", "scale", 0.03, "an adapter on model.embed_tokens alone: the scale"),
        ("NUM-008", "scale", 0.1, "an adapter on lm_head alone: the scale"),
    ],
)
async def test_each_clause_about_modules_sees_their_scale(
    bench: Bench, model_path: Path, clause: str, fault: str, size: float, told: str, sign: int
):
    found = await failure(bench, model_path, "bfloat16", clause, fault, sign * size)
    assert found.startswith(f"{told} that the logprobs show is {'1.' if sign > 0 else '0.'}")


@pytest.mark.parametrize(
    ("dtype", "clause"), [("bfloat16", "NUM-001"), ("float16", "NUM-003"), ("bfloat16", "RANK-002")]
)
async def test_right_ones_in_few_bits_pass(bench: Bench, model_path: Path, dtype: str, clause: str):
    report = await check_rollout(
        faulty.make, Settings(model=str(model_path), dtype=dtype, only=(clause,)), bench=bench
    )
    assert report.ok, [result.message for result in report.results]
    assert "the scale " in report.results[-1].message
