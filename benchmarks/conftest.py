"""What the benchmarks share: one engine, a trainer's adapter, an event loop that runs while it is asked to.

``pytest benchmarks`` measures the reference on this machine's CPU with a tiny model;
``pytest benchmarks --device cuda --size 7b`` on a GPU; ``--rollout pkg.mod:factory`` somebody else's rollout.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollproof.factory import load
from rollproof.models import write_config
from rollproof.protocol import RolloutSpec
from rollproof.runner import device, versions
from rollproof_benchmarks.baselines import BASELINES, GPU_BASELINES
from rollproof_benchmarks.running import FOLD_WORKER, WORKER, Running, reference, started
from rollproof_benchmarks.traffic import REPEATS, requests, run
from rollproof_benchmarks.trainer import Trainer
from rollproof_reference.layers import model_layers
from rollproof_reference.start import WITH_LORA

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

SIZES = {"tiny": "tiny-qwen2", "0.5b": "qwen2-0.5b", "7b": "qwen2-7b", "32b": "qwen2-32b"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollproof benchmarks")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where engine and trainer run")
    group.addoption("--size", choices=tuple(SIZES), default="tiny", help="the shape of the base model")
    group.addoption("--rank", type=int, default=0, help="the adapter's rank (32 on a GPU, else 8)")
    group.addoption("--rounds", type=int, default=0, help="updates per measurement (50 on a GPU, else 10)")
    group.addoption("--requests", type=int, default=0, help="requests at once (128 on a GPU, else 8)")
    group.addoption("--engine", default="", help="further options for the reference: key=value,key=value")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Results are committed: what a run needs to say of its device is in each one's extra_info."""
    machine_info.clear()


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    """Results are committed with what they measured."""
    commit_info.clear()


@pytest.fixture(scope="session")
def on_gpu(request: pytest.FixtureRequest) -> bool:
    """Whether engine and trainer share a GPU."""
    cuda = request.config.getoption("device") == "cuda"
    if cuda and not torch.cuda.is_available():
        pytest.exit("--device cuda: this machine shows no GPU", returncode=4)
    return cuda


@pytest.fixture(scope="session")
def amounts(request: pytest.FixtureRequest, on_gpu: bool) -> dict[str, int]:
    """Rank, rounds and requests, and how many tokens each request asks for."""
    usual = (
        {"rank": 32, "rounds": 50, "requests": 128} if on_gpu else {"rank": 8, "rounds": 10, "requests": 8}
    )
    chosen = {name: request.config.getoption(name) or value for name, value in usual.items()}
    return chosen | {"tokens": 256 if on_gpu else 32}


@pytest.fixture(scope="session")
def spec(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    amounts: dict[str, int],
    on_gpu: bool,
) -> RolloutSpec:
    """A model's shape; its weights are made by the engine, at random."""
    folder = write_config(tmp_path_factory.mktemp("model") / "shape", SIZES[request.config.getoption("size")])
    return RolloutSpec(
        str(folder),
        dtype="bfloat16" if on_gpu else "float32",
        max_lora_rank=amounts["rank"],
        max_model_len=1024,
        max_num_seqs=amounts["requests"],
        workdir=str(tmp_path_factory.mktemp("work")),
    )


@pytest.fixture(scope="session")
def running(request: pytest.FixtureRequest, spec: RolloutSpec) -> Iterator[Running]:
    """The rollout to measure."""
    given = request.config.getoption("rollout", None)
    target = (
        load(given)
        if given
        else reference(request.config.getoption("engine"), sync="tensors", worker_extension_cls=WORKER)
    )
    yield from started(target, spec, not given)


@pytest.fixture
def trainer(spec: RolloutSpec, amounts: dict[str, int], on_gpu: bool) -> Trainer:
    """The adapter to send, on every linear layer but the output one."""
    layers = model_layers(spec.model_path)
    shapes = {n: s for n, s in layers.shapes.items() if n not in (layers.output, layers.embedding)}
    return Trainer(shapes, amounts["rank"], getattr(torch, spec.dtype), "cuda" if on_gpu else "cpu")


STRATEGIES = (*WITH_LORA, "fold")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized = any(mark.args[0] == "updated" for mark in metafunc.definition.iter_markers("parametrize"))
    if "updated" in metafunc.fixturenames and not parametrized:
        yours = bool(metafunc.config.getoption("rollout", None))
        gpu = metafunc.config.getoption("device") == "cuda"
        wanted = [*STRATEGIES, *BASELINES, *(GPU_BASELINES if gpu else ())]
        metafunc.parametrize("updated", ["yours"] if yours else wanted, indirect=True)


@pytest.fixture(scope="session")
def folding(request: pytest.FixtureRequest, running: Running, spec: RolloutSpec) -> Iterator[Any]:
    """The reference on an engine without LoRA that adapters are folded into, on the same loop."""
    target = reference(request.config.getoption("engine"), sync="fold", worker_extension_cls=FOLD_WORKER)
    context = target.start(spec)
    yield running.run(context.__aenter__())
    running.run(context.__aexit__(None, None, None))


@pytest.fixture
def updated(request: pytest.FixtureRequest, running: Running, spec: RolloutSpec) -> Iterator[Any]:
    """A rollout on the running engine that updates in one of the ways."""
    name = request.param
    if name in STRATEGIES and not running.reference:
        pytest.skip("only the reference is looked into")
    if name == "fold":
        own = request.getfixturevalue("folding")
        yield own
        running.run(own.unload_adapter())
        return
    if name == "yours":
        yield running.rollout
        return
    if name in STRATEGIES:
        from rollproof_reference import AsyncRollout
        from rollproof_reference.start import strategy_for

        worker = running.run(running.rollout.engine.collective_rpc("rollproof_describe"))[0]
        own: Any = AsyncRollout(
            running.rollout.engine, spec, strategy_for(name, spec, worker), running.rollout.served
        )
    else:
        own = (BASELINES | GPU_BASELINES)[name](running.rollout)
    yield own
    running.run(own.unload_adapter())
    if name in STRATEGIES:
        own.sync.close()


@pytest.fixture
def told(
    benchmark: Any, request: pytest.FixtureRequest, trainer: Trainer, running: Running, on_gpu: bool
) -> dict[str, Any]:
    """What every result says of where it came from; a test adds its own."""
    found: dict[str, Any] = benchmark.extra_info
    found.update(
        device=torch.cuda.get_device_name() if on_gpu else device(),
        size=request.config.getoption("size"),
        versions=versions(),
        engine=dict(getattr(running.rollout, "details", {})),
        **trainer.describe(),
    )
    return found


Throughput = Callable[..., None]


@pytest.fixture
def throughput(benchmark: Any, amounts: dict[str, int], told: dict[str, Any]) -> Throughput:
    """``throughput(running, rollout, adapter=True)``: measure tokens per second of many requests at once."""

    def measure(running: Running, rollout: Any, *, adapter: bool = True) -> None:
        running.run(run(rollout, requests(amounts["requests"], 16, 0, adapter=adapter)))
        found: list[float] = []

        def once() -> None:
            asked = requests(amounts["requests"], amounts["tokens"], 1 + len(found), adapter=adapter)
            found.append(running.run(run(rollout, asked)).throughput)

        benchmark.pedantic(once, rounds=REPEATS)
        told.update(throughput=statistics.median(found), requests=amounts["requests"])

    return measure
