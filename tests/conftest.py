"""What tests share: one made model, one running engine, adapters for it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from hypothesis import settings

from rollproof.models import make_adapter, make_model
from rollproof.oracle import Oracle
from rollproof.protocol import Adapter, RolloutSpec

# On models this small threads only wait for each other: in the oracle and in the engine, one each.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

settings.register_profile("ci", deadline=None, max_examples=100, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=20_000, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", metavar="FILE", help="write which known-bad rollout fails what")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("kills"):
        from known_bad import KNOWN_BAD
        from known_bad.kills import Kills

        config.pluginmanager.register(Kills(file, {case.name: case.fault for case in KNOWN_BAD}))


MakeAdapter = Callable[..., Adapter]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny-qwen2")


@pytest.fixture(scope="session")
def spec(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RolloutSpec:
    # vLLM's LoRA kernels refuse float32 on a GPU.
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return RolloutSpec(str(model_path), dtype=dtype, workdir=str(tmp_path_factory.mktemp("work")))


@pytest.fixture(scope="session")
def base_oracle(model_path: Path) -> Oracle:
    return Oracle(model_path, torch.float32)


@pytest.fixture
def adapter(base_oracle: Oracle) -> MakeAdapter:
    """``adapter(version, seed=..., **config)``: a random adapter for the made model."""

    def make(version: int = 1, *, seed: int = 0, strength: float = 0.5, **config: Any) -> Adapter:
        generator = torch.Generator().manual_seed(1000 * seed + version)
        return make_adapter(base_oracle.layers(), version, generator, strength=strength, **config)

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running(spec: RolloutSpec) -> AsyncIterator[Any]:
    """The reference on an engine that tests share. They leave it without an adapter loaded."""
    from rollproof_reference import make

    async with make(spec, sync="tensors") as rollout:
        yield rollout
