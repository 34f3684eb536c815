"""A scale that is off by little shows over many tokens, and noise doesn't look like one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import faulty
from rollproof import Outcome, Settings, check_rollout
from rollproof.bench import Bench
from rollproof.judge import MARGIN, Scored
from rollproof.models import make_adapter
from rollproof.oracle import Oracle
from rollproof.outcome import FailureError, UnderpoweredError
from rollproof.scale import FAULT, FLOOR, allowance, claim, direction, relative_error, rescaled, told

ALLOWED = 0.005
OPTIONS = [
    {"lora_alpha": 1},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3.0, "down_proj": 40}},
]


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def scene(request: pytest.FixtureRequest, base_oracle: Oracle) -> Iterator[tuple]:
    """The oracle, an adapter that it knows as version 1, and tokens of it."""
    generator = torch.Generator().manual_seed(0)
    adapter = make_adapter(base_oracle.layers(), 1, generator, strength=0.5, **request.param)
    base_oracle.add(adapter)
    prompts = [tuple(row) for row in torch.randint(0, 1000, (4, 24), generator=generator).tolist()]
    yield base_oracle, adapter, base_oracle.sample(1, prompts, 16, 1.0, generator)
    base_oracle.forget(1)


@pytest.mark.parametrize("error", [-0.02, -0.001, 0.001, 0.02])
def test_an_error_of_every_scale_is_found_at_its_size(scene: tuple, error: float):
    oracle, adapter, samples = scene
    tensors = {n: t * (1 + error) if "lora_B" in n else t for n, t in adapter.tensors.items()}
    oracle.add(type(adapter)(2, adapter.config, tensors))
    truth, found = (torch.cat([s.logprobs for s in oracle.score(v, samples)]) for v in (1, 2))
    oracle.forget(2)
    assert relative_error(direction(oracle, adapter, samples), found - truth) == pytest.approx(error, rel=0.1)
    assert oracle.versions == [0, 1], "the direction leaves no version behind"


def test_a_rescaled_adapter_is_another_and_leaves_the_first_alone(scene: tuple):
    _, adapter, _ = scene
    digest, alphas = adapter.digest(), dict(adapter.config.alpha_pattern or {})
    double = rescaled(adapter, 7, 2.0)
    assert adapter.digest() == digest
    assert (double.version, double.config.lora_alpha) == (7, 2 * adapter.config.lora_alpha)
    assert double.config.alpha_pattern == {name: 2 * alpha for name, alpha in alphas.items()}


@given(seed=st.integers(0, 2**32), error=st.floats(-0.5, 0.5))
def test_noise_averages_out_of_the_error(seed: int, error: float):
    generator = torch.Generator().manual_seed(seed)
    along = 3 * torch.randn(400, generator=generator)
    noise = 0.03 * torch.randn(400, generator=generator)
    # The estimate's standard deviation is 0.03 / (3 * sqrt(400)) = 5e-4.
    assert relative_error(along, error * along + noise) == pytest.approx(error, abs=7 * 5e-4)


@given(st.lists(st.floats(-0.1, 0.1), min_size=1), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_allowed_covers_the_noise_and_a_scale_in_the_dtype(noise: list[float], dtype: torch.dtype):
    allowed = allowance(dtype, noise)
    assert allowed >= max(FLOOR, MARGIN * max(map(abs, noise)))
    for scale in (0.1, 1.003, 5.657, 63.9):
        assert abs(torch.tensor(scale, dtype=dtype).item() / scale - 1) < allowed


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_scale_within_what_is_allowed_passes_and_one_beyond_it_fails(sign: int):
    assert told(sign * 0.0049, ALLOWED) == f"the scale is {1 + sign * 0.0049:.4f} (allowed 0.9950 to 1.0050)"
    with pytest.raises(FailureError, match="the scale that the logprobs show is") as failure:
        told(sign * 0.0051, ALLOWED)
    assert f"{1 + sign * 0.0051:.4f} of the adapter's (allowed 0.9950 to 1.0050)" in str(failure.value)


def test_logprobs_that_say_nothing_of_the_scale_are_no_pass():
    with pytest.raises(FailureError):
        told(relative_error(torch.zeros(8), torch.zeros(8)), ALLOWED)


def test_nothing_is_claimed_where_the_fault_could_hide():
    just = FAULT / (1 + 1 / MARGIN)
    assert "the scale is 1.0000" in told(0.0, just * 0.99)
    with pytest.raises(UnderpoweredError, match="one that is off by 2% has to be sure to show"):
        told(0.0, just * 1.01)
    with pytest.raises(FailureError):
        told(2 * just, just * 1.01)


def test_without_logprobs_the_scale_is_not_claimed(scene: tuple):
    oracle, adapter, samples = scene
    scored = [Scored(s.tokens, 0.0, None, [1], {}) for s in samples]
    assert "not claimed" in claim(oracle, adapter, samples, scored, ALLOWED)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 0.02), ("bfloat16", -0.02), ("float16", 0.003)])
async def test_what_no_token_shows_fails_by_all_of_them(
    bench: Bench, model_path: Path, dtype: str, size: float
):
    settings = Settings(model=str(model_path), dtype=dtype, only=("NUM-003",))
    report = await check_rollout(faulty.make, settings, bench=bench, fault="scale of rsLoRA", size=str(size))
    assert report.outcomes(Outcome.FAIL) == {"NUM-003"}
    assert "with {'use_rslora': True}: the scale that the logprobs show is" in report.results[-1].message


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_right_ones_in_few_bits_pass(bench: Bench, model_path: Path, dtype: str):
    report = await check_rollout(
        faulty.make, Settings(model=str(model_path), dtype=dtype, only=("NUM-003",)), bench=bench
    )
    assert report.ok, [result.message for result in report.results]
    assert "the scale is " in report.results[-1].message
