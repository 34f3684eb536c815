"""What each way to serve an adapter costs per token, on an engine of its own, and a push of all weights."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from rollproof.factory import Target
from rollproof.protocol import RolloutSpec
from rollproof_benchmarks.plain import FullPush, make
from rollproof_benchmarks.running import Running, reference, started
from rollproof_benchmarks.traffic import requests, run

OVERSIZE = 8
"""``max_lora_rank`` is so many times the adapter's rank: kernels compute over all of it."""

PUSHES = 10
TURNS = 8


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


@pytest.mark.parametrize("other", ["merged"], indirect=True)
def test_fold_beside_merged(
    request: pytest.FixtureRequest,
    benchmark: Any,
    other: Running,
    running: Running,
    trainer: Any,
    amounts: dict[str, int],
    told: dict[str, Any],
):
    """Tokens per second of folded weights and of an engine with such weights from the start, by turns: two
    runs of one engine, some time apart, can differ by more than the two do."""
    folding = request.getfixturevalue("folding")
    running.run(folding.update_adapter(trainer.step()))
    found: dict[str, list[float]] = {"fold": [], "merged": []}

    def turn() -> None:
        asked = requests(amounts["requests"], amounts["tokens"], len(found["fold"]))
        for name, engine, rollout in (("fold", running, folding), ("merged", other, other.rollout)):
            found[name].append(engine.run(run(rollout, asked)).throughput)

    benchmark.pedantic(turn, rounds=TURNS, warmup_rounds=1)
    fold, merged = found["fold"][1:], found["merged"][1:]
    told.update(
        turns=TURNS,
        fold=statistics.median(fold),
        merged=statistics.median(merged),
        fold_to_merged=statistics.median(f / m for f, m in zip(fold, merged, strict=True)),
    )
    running.run(folding.unload_adapter())


def test_full_push(benchmark: Any, other: Running, spec: RolloutSpec, told: dict[str, Any]):
    """All merged weights from the trainer's memory into the engine, as frameworks without adapters do it."""
    if hasattr(other.rollout, "update_adapter"):
        pytest.skip("weights are pushed to the engine that serves merged ones")
    if not can_push():
        pytest.skip("vLLM's weight transfer over CUDA IPC needs a GPU, and ray")
    trainer = FullPush(other.rollout.engine, spec.model_path, getattr(torch, spec.dtype))
    benchmark.pedantic(lambda: other.run(trainer.push()), rounds=PUSHES, warmup_rounds=1)
    told.update(pushed_bytes=trainer.bytes)
