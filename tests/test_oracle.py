"""The oracle is the merged model: against plain matrix algebra, and against its own parts."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import MakeAdapter
from rollproof.calibrate import Calibration, trial
from rollproof.candidates import BASE, Mixed
from rollproof.models import SHAPES, make_model
from rollproof.oracle import ModelError, Oracle, Sample
from rollproof.protocol import Adapter
from rollproof.session import SIZES

SAMPLES = [Sample(tuple(range(5 + i, 45 + i)), tuple(range(100 + i, 108 + i)), i % 2) for i in range(3)]


def by_hand(oracle: Oracle, adapter: Adapter, scale: dict[str, float], samples: list[Sample]):
    """The logprobs of W + scale * B @ A, written out."""
    model = copy.deepcopy(oracle._base)
    for name, module in model.named_modules():
        if f"base_model.model.{name}.lora_A.weight" in adapter.tensors:
            a, b = (adapter.tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
            module.weight += scale[name.rpartition(".")[2]] * (b @ a)
    return [oracle_logprobs(model, sample) for sample in samples]


def oracle_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt, *sample.tokens]])
    found = model(ids).logits[0].log_softmax(-1)[len(sample.prompt) - 1 : -1]
    return found.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]


@torch.inference_mode()
def test_scores_are_those_of_the_merged_weights(base_oracle: Oracle, adapter: MakeAdapter):
    plain = adapter(1, rank=4, lora_alpha=12)
    base_oracle.add(plain)
    leaves = {name.rpartition(".")[2] for name in base_oracle.layers()}
    expected = by_hand(base_oracle, plain, dict.fromkeys(leaves, 3.0), SAMPLES)
    for sample, score, logprobs in zip(SAMPLES, base_oracle.score(1, SAMPLES), expected, strict=True):
        torch.testing.assert_close(score.logprobs, logprobs, atol=2e-5, rtol=0)
        assert (score.top >= score.logprobs).all()
        assert (score.surprise is not None) == (sample.temperature > 0)
    base_oracle.forget(1)


@torch.inference_mode()
def test_patterns_and_rslora_scale_each_module_by_its_own(base_oracle: Oracle, adapter: MakeAdapter):
    odd = adapter(
        1, rank=4, lora_alpha=8, use_rslora=True, rank_pattern={"q_proj": 9}, alpha_pattern={"up_proj": 6}
    )
    base_oracle.add(odd)
    leaves = {name.rpartition(".")[2] for name in base_oracle.layers()}
    scale = dict.fromkeys(leaves, 8 / 4**0.5) | {"q_proj": 8 / 3, "up_proj": 6 / 4**0.5}
    expected = by_hand(base_oracle, odd, scale, SAMPLES)
    for score, logprobs in zip(base_oracle.score(1, SAMPLES), expected, strict=True):
        torch.testing.assert_close(score.logprobs, logprobs, atol=2e-5, rtol=0)
    base_oracle.forget(1)


def test_stale_kv_is_between_the_versions(base_oracle: Oracle, adapter: MakeAdapter):
    for version in (1, 2):
        base_oracle.add(adapter(version))
    new, old = base_oracle.score(2, SAMPLES), base_oracle.score(1, SAMPLES)
    stale = base_oracle.score(Mixed(((1, 0), (2, 32))), SAMPLES)
    own = base_oracle.score(Mixed(((2, 0), (2, 32))), SAMPLES)
    for i in range(len(SAMPLES)):
        torch.testing.assert_close(own[i].logprobs, new[i].logprobs, atol=2e-5, rtol=0)
        assert (stale[i].logprobs - new[i].logprobs).abs().max() > 0.1
        assert (stale[i].logprobs - old[i].logprobs).abs().max() > 0.1
    for version in (1, 2):
        base_oracle.forget(version)


def test_an_adapter_is_copied(base_oracle: Oracle, adapter: MakeAdapter):
    mine = adapter(1)
    before = {name: tensor.clone() for name, tensor in mine.tensors.items()}
    base_oracle.add(mine)
    for tensor in mine.tensors.values():
        tensor.zero_()
    expected = base_oracle.score(BASE, SAMPLES)
    found = base_oracle.score(1, SAMPLES)
    assert (found[0].logprobs - expected[0].logprobs).abs().max() > 0.1
    assert any(tensor.any() for tensor in before.values())
    base_oracle.forget(1)


def test_a_sample_is_what_the_model_gives(base_oracle: Oracle):
    generator = torch.Generator().manual_seed(0)
    greedy = base_oracle.sample(BASE, [tuple(range(9)), tuple(range(20, 29))], 6, 0.0, generator)
    for score, sample in zip(base_oracle.score(BASE, greedy), greedy, strict=True):
        assert score.top_ids.tolist() == list(sample.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_adapters_stand_out_of_the_noise_of_every_dtype(model_path: Path, dtype: torch.dtype):
    oracle = Oracle(model_path, dtype)
    calibration = Calibration(oracle, 0, SIZES)
    for size in SIZES:
        tolerance, effect = trial(oracle, calibration.strength, *size, seed=0)
        assert tolerance == calibration.tolerance(size)
        assert effect > 10 * tolerance.completion
    assert oracle.versions == [BASE]


def test_more_noise_is_measured_in_a_coarser_dtype(model_path: Path):
    found = [
        trial(Oracle(model_path, dtype), 0.5, 24, 16, seed=0)[0].noise
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    assert found[0] * 100 < found[1] < found[2] / 2


def test_a_made_model_is_the_same_every_time_and_peaked(
    model_path: Path, tmp_path: Path, base_oracle: Oracle
):
    again = make_model(tmp_path / "again")
    name = "model.safetensors"
    assert (again / name).read_bytes() == (model_path / name).read_bytes()
    assert (make_model(tmp_path / "other", seed=1) / name).read_bytes() != (again / name).read_bytes()
    ids = torch.randint(
        0, SHAPES["tiny-qwen2"].vocab_size, (8, 64), generator=torch.Generator().manual_seed(0)
    )
    with torch.inference_mode():
        logprobs = base_oracle._base(ids).logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
    assert 1 < entropy < 3
    top = logprobs.topk(2, -1).values
    assert (top[..., 0] - top[..., 1]).median() > 0.3


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(ModelError, match=r"^no model at '.*': .* a Hugging Face folder with a config.json$"):
        Oracle(tmp_path / "missing", torch.float32)
    with pytest.raises(ValueError, match="there are tiny-qwen2, tiny-llama"):
        make_model(tmp_path / "x", "gpt-5")
    assert not (tmp_path / "x").exists()


def test_versions_with_the_same_weights_are_one_candidate(model_path: Path, adapter: MakeAdapter):
    oracle = Oracle(model_path, torch.float32)
    first, second, inert = adapter(1), adapter(2), adapter(3)
    for name, tensor in inert.tensors.items():
        if ".lora_B." in name:
            tensor.zero_()
    again = replace(first, version=4)
    scaled = replace(adapter(1, lora_alpha=3), version=5, tensors=first.tensors)
    for one in (first, second, inert, again, scaled):
        oracle.add(one)
    assert [oracle.alike(version) for version in oracle.versions] == [BASE, 1, 2, BASE, 1, 5]
    assert oracle.distinct == [BASE, 1, 2, 5]
    oracle.forget(1)
    assert oracle.alike(4) == 4
