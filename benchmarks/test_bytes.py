"""How the arena's work grows with an adapter's bytes: filling a half, and copying it to where kernels read.

No engine runs: memory of the same sizes and shapes stands for the engine's. What is left of an update is a
call to the engine, which has one cost for all sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollproof.models import write_config
from rollproof_benchmarks.trainer import Trainer
from rollproof_benchmarks.worker import timed
from rollproof_reference.copying import Copies, Fill
from rollproof_reference.layers import model_layers

RANKS = (8, 16, 32, 64, 128)
MODELS = {"cpu": ("tiny-qwen2",), "cuda": ("qwen2-0.5b", "qwen2-7b", "qwen2-32b")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sized" in metafunc.fixturenames:
        models = MODELS[metafunc.config.getoption("device")]
        cases = [(model, rank) for model in models for rank in RANKS]
        metafunc.parametrize("sized", cases, ids=[f"{model} rank {rank}" for model, rank in cases])


def test_fill_and_copy(
    benchmark: Any,
    sized: tuple[str, int],
    tmp_path_factory: pytest.TempPathFactory,
    amounts: dict[str, int],
    on_gpu: bool,
):
    """Seconds on the device for both, and for the fastest copy of as many bytes."""
    name, rank = sized
    device = torch.device("cuda" if on_gpu else "cpu")
    layers = model_layers(str(write_config(tmp_path_factory.mktemp("model") / name, name)))
    shapes = {n: s for n, s in layers.shapes.items() if n not in (layers.output, layers.embedding)}
    trainer = Trainer(shapes, rank, torch.bfloat16 if on_gpu else torch.float32, device.type)
    sources = list(trainer.step().tensors.values())
    half = [torch.empty_like(tensor) for tensor in sources]
    stacked = [torch.empty_like(tensor) for tensor in sources]
    infinite = torch.ones(1, dtype=torch.int32, device=device)
    fill = Fill(half, [2.0] * len(half), infinite)
    copy = Copies(list(zip(stacked, half, strict=True)))
    of = torch.empty(trainer.bytes, dtype=torch.uint8, device=device)
    to = torch.empty_like(of)

    def measure() -> tuple[float, ...]:
        rounds = amounts["rounds"]
        return tuple(
            timed(work, rounds, device) for work in (lambda: fill(sources), copy, lambda: to.copy_(of))
        )

    filled, copied, floor = benchmark.pedantic(measure, rounds=1)
    assert not infinite.item()
    assert all(tensor.equal(2 * source) for tensor, source in zip(stacked, sources, strict=True))
    benchmark.extra_info.update(
        device=torch.cuda.get_device_name() if on_gpu else device.type,
        model=name,
        fill_us=1e6 * filled,
        copy_us=1e6 * copied,
        floor_us=1e6 * floor,
        **trainer.describe(),
    )
