"""What each way to serve an adapter costs per token, on an engine of its own, and a push of all weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from rollproof.factory import Target
from rollproof.protocol import RolloutSpec
from rollproof_benchmarks.plain import FullPush, make
from rollproof_benchmarks.running import Running, reference, started

OVERSIZE = 8
"""``max_lora_rank`` is so many times the adapter's rank: kernels compute over all of it."""

PUSHES = 10


@pytest.fixture(scope="module", params=["merged", "oversized"])
def other(request: pytest.FixtureRequest, spec: RolloutSpec, amounts: dict[str, int]) -> Iterator[Running]:
    """An engine without LoRA, or one with room for a far higher rank than the adapter's."""
    if request.config.getoption("rollout", None):
        pytest.skip("engines of other rollouts are theirs to start")
    more = request.config.getoption("engine")
    if request.param == "oversized":
        rank = min(256, OVERSIZE * amounts["rank"])
        yield from started(reference(more, sync="arena", max_lora_rank=str(rank)), spec, True)
    else:
        options = dict(pair.split("=", 1) for pair in filter(None, more.split(",")))
        if can_push():
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
            options["weight_transfer_config"] = '{"backend": "ipc"}'
        yield from started(Target("merged", make, options), spec, False)


def can_push() -> bool:
    """vLLM's transfer over CUDA IPC imports ray."""
    return torch.cuda.is_available() and find_spec("ray") is not None


def test_throughput(other: Running, trainer: Any, throughput: Any):
    """Tokens per second of many requests at once."""
    if hasattr(other.rollout, "update_adapter"):
        other.run(other.rollout.update_adapter(trainer.step()))
    throughput(other, other.rollout)


def test_full_push(benchmark: Any, other: Running, spec: RolloutSpec, told: dict[str, Any]):
    """All merged weights from the trainer's memory into the engine, as frameworks without adapters do it."""
    if hasattr(other.rollout, "update_adapter"):
        pytest.skip("weights are pushed to the engine that serves merged ones")
    if not can_push():
        pytest.skip("vLLM's weight transfer over CUDA IPC needs a GPU, and ray")
    trainer = FullPush(other.rollout.engine, spec.model_path, getattr(torch, spec.dtype))
    benchmark.pedantic(lambda: other.run(trainer.push()), rounds=PUSHES, warmup_rounds=1)
    told.update(pushed_bytes=trainer.bytes)
