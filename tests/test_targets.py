"""Which modules a config means: the reference, on a real engine, against what PEFT itself makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollproof.judge import rms
from rollproof.oracle import BASE, Oracle, Sample
from rollproof.protocol import Adapter, GenerateRequest, RolloutSpec
from rollproof_reference import AsyncRollout
from rollproof_reference.sync.tensors import TensorSync

REQUEST = GenerateRequest(tuple(range(7, 47)), 12)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"target_modules": "all-linear"}, 14),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj", "down_proj"]}, 10),
        ({"target_modules": r".*\.layers\.1\.(self_attn|mlp)\.(v|up)_proj"}, 2),
        ({"target_modules": r".*_proj", "exclude_modules": r".*\.layers\.0\..*"}, 7),
        ({"target_modules": ["o_proj", "model.layers.0.mlp.gate_proj"]}, 3),
        (
            {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
            2,
        ),
        ({"target_modules": ["v_proj"], "layers_to_transform": 0}, 1),
    ],
    ids=str,
)
async def test_a_config_means_the_modules_that_peft_puts_it_on(
    options: dict[str, Any], count: int, running: AsyncRollout, spec: RolloutSpec
):
    oracle = Oracle(spec.model_path, getattr(torch, spec.dtype))
    config, state = oracle.peft_state(r=4, lora_alpha=16, **options)
    assert len(state) == 2 * count
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5
        for name, tensor in state.items()
    }
    adapter = Adapter(1, config, tensors)
    oracle.add(adapter)
    rollout = AsyncRollout(running.engine, spec, TensorSync(), running.served)
    await rollout.update_adapter(adapter)
    completion = await rollout.generate(REQUEST)
    await rollout.unload_adapter()
    assert completion.logprobs is not None
    sample = Sample(REQUEST.prompt_token_ids, completion.token_ids)
    observed = torch.tensor(completion.logprobs)
    apart = {v: rms(observed - oracle.score(v, [sample])[0].logprobs).item() for v in oracle.versions}
    assert apart[1] < (1e-3 if spec.dtype == "float32" else 0.2)
    assert apart[BASE] > 10 * apart[1]
