"""The reference rollout on a real engine: whole updates, whatever is cancelled, broken or in flight."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from conftest import MakeAdapter
from rollproof.candidates import BASE
from rollproof.judge import rms
from rollproof.oracle import Oracle, Sample
from rollproof.protocol import Adapter, Completion, GenerateRequest, RolloutSpec
from rollproof_reference import AdapterError, AsyncRollout, RolloutClosedError, make, start_engine
from rollproof_reference.plain import PlainAdapter
from rollproof_reference.start import WITH_LORA, strategy_for
from rollproof_reference.sync import Sync
from rollproof_reference.sync.disk import DiskSync
from rollproof_reference.sync.tensors import TensorSync

REQUEST = GenerateRequest(tuple(range(7, 47)), 12)


@pytest.fixture
def oracle(model_path: Path, spec: RolloutSpec) -> Oracle:
    return Oracle(model_path, getattr(torch, spec.dtype))


@pytest_asyncio.fixture(loop_scope="session", params=WITH_LORA)
async def rollout(
    request: pytest.FixtureRequest, running: AsyncRollout, spec: RolloutSpec
) -> AsyncIterator[AsyncRollout]:
    """A rollout of its own on the shared engine, with each strategy in turn."""
    sync = strategy_for(request.param, spec, await described(running))
    own = AsyncRollout(running.engine, spec, sync, running.served)
    yield own
    await own.unload_adapter()
    sync.close()


async def described(running: AsyncRollout) -> dict[str, Any]:
    return dict((await running.engine.collective_rpc("rollproof_describe"))[0])


def nearest(oracle: Oracle, completion: Completion) -> int:
    """The version whose logprobs a completion of REQUEST has."""
    assert completion.logprobs is not None
    sample = Sample(REQUEST.prompt_token_ids, completion.token_ids)
    observed = torch.tensor(completion.logprobs)
    apart = {v: rms(observed - oracle.score(v, [sample])[0].logprobs).item() for v in oracle.versions}
    best = min(apart, key=lambda v: apart[v])
    assert apart[best] < 0.2, apart
    return best


async def test_each_update_serves_and_the_base_stays(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter
):
    assert nearest(oracle, await rollout.generate(REQUEST)) == BASE
    for version in (1, 2):
        oracle.add(adapter(version))
        await rollout.update_adapter(adapter(version))
        completion = await rollout.generate(REQUEST)
        assert nearest(oracle, completion) == version
        assert completion.version_spans == ((0, version),)
        assert nearest(oracle, await rollout.generate(replace(REQUEST, adapter=False))) == BASE
        assert [item.int_id for item in await rollout.loaded_adapters()] == [1]


async def test_a_version_comes_once(rollout: AsyncRollout, adapter: MakeAdapter):
    await rollout.update_adapter(adapter(2))
    epoch = rollout._epoch
    await rollout.update_adapter(adapter(2))
    assert rollout._epoch == epoch
    with pytest.raises(AdapterError, match="version 2 came again with other tensors"):
        await rollout.update_adapter(adapter(2, seed=1))
    with pytest.raises(AdapterError, match="version 1 came after version 2"):
        await rollout.update_adapter(adapter(1))


async def test_a_refused_update_changes_nothing_and_can_be_mended(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter
):
    for version in (1, 2):
        oracle.add(adapter(version))
    await rollout.update_adapter(adapter(1))
    good = adapter(2)
    name = next(iter(good.tensors))
    broken = Adapter(2, good.config, good.tensors | {name: good.tensors[name] * float("nan")})  # type: ignore[operator]
    with pytest.raises(AdapterError, match="NaN"):
        await rollout.update_adapter(broken)
    assert nearest(oracle, await rollout.generate(REQUEST)) == 1
    assert rollout.version == 1
    await rollout.update_adapter(good)
    assert nearest(oracle, await rollout.generate(REQUEST)) == 2


async def test_the_old_adapter_is_put_back_when_the_engine_fails(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
):
    """What no check foresaw fails inside the engine, and the old version serves on."""
    oracle.add(adapter(1))
    await rollout.update_adapter(adapter(1))
    prepared = rollout._prepare(adapter(2, target_modules=["down_proj"]))
    if isinstance(prepared, PlainAdapter):
        name = next(name for name in prepared.tensors if "down_proj.lora_B" in name)
        prepared.tensors[name] = torch.zeros(999, 8)  # more rows than the engine's buffer has
    else:
        name, first, rows, columns = prepared.arena.places[-1]
        prepared.arena.places[-1] = (name, first, rows // 2, columns * 2)
    monkeypatch.setattr(rollout, "_prepare", lambda _: prepared)
    with pytest.raises(Exception, match=r"size|shape|match|can't be copied into"):
        await rollout.update_adapter(adapter(2))
    assert rollout.version == 1
    assert nearest(oracle, await rollout.generate(REQUEST)) == 1


async def test_many_generations_and_updates_at_once(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter
):
    updates = [adapter(version) for version in range(1, 6)]
    for item in updates:
        oracle.add(item)

    async def update_all() -> None:
        for item in updates:
            await rollout.update_adapter(item)

    requests = [replace(REQUEST, max_tokens=64, adapter=i % 2 == 0) for i in range(24)]
    _, *completions = await asyncio.gather(update_all(), *(rollout.generate(r) for r in requests))
    assert all(len(completion.token_ids) == 64 for completion in completions)
    for completion in completions[1::2]:
        assert nearest(oracle, completion) == BASE
    assert nearest(oracle, await rollout.generate(REQUEST)) == 5


async def test_a_cancelled_generation_leaves_a_working_rollout(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter
):
    oracle.add(adapter(1))
    await rollout.update_adapter(adapter(1))
    task = asyncio.ensure_future(rollout.generate(replace(REQUEST, max_tokens=900)))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not rollout._running
    assert nearest(oracle, await rollout.generate(REQUEST)) == 1


class Held:
    """A strategy that waits before it pushes, and says when it started."""

    name = "held"

    def __init__(self, inner: Sync[Any]) -> None:
        self.inner = inner
        self.started, self.go = asyncio.Event(), asyncio.Event()

    async def push(self, *args: Any) -> str:
        self.started.set()
        await self.go.wait()
        return await self.inner.push(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_an_update_cancelled_while_it_travels_is_applied_whole(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter
):
    oracle.add(adapter(1))
    rollout.sync = held = Held(rollout.sync)
    task = asyncio.ensure_future(rollout.update_adapter(adapter(1)))
    await held.started.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rollout.version == 1
    assert nearest(oracle, await rollout.generate(REQUEST)) == 1


async def test_an_update_cancelled_before_it_travels_changes_nothing(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter
):
    for version in (1, 2, 3):
        oracle.add(adapter(version))
    await rollout.update_adapter(adapter(1))
    rollout.sync = held = Held(rollout.sync)
    first = asyncio.ensure_future(rollout.update_adapter(adapter(2)))
    await held.started.wait()
    second = asyncio.ensure_future(rollout.update_adapter(adapter(3)))  # waits for the first
    await asyncio.sleep(0.05)
    second.cancel()
    held.go.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert nearest(oracle, await rollout.generate(REQUEST)) == 2


async def test_a_prompt_that_does_not_fit_is_refused(rollout: AsyncRollout):
    for request in (
        replace(REQUEST, max_tokens=0),
        replace(REQUEST, max_tokens=985),
        replace(REQUEST, prompt_token_ids=()),
    ):
        with pytest.raises(ValueError, match=r"both have to be at least 1 and together at most 1024"):
            await rollout.generate(request)


async def test_the_disk_strategy_keeps_one_folder(
    running: AsyncRollout, spec: RolloutSpec, adapter: MakeAdapter
):
    sync = DiskSync(spec.workdir)
    rollout = AsyncRollout(running.engine, spec, sync, running.served)
    for version in (1, 2, 3):
        await rollout.update_adapter(adapter(version))
    assert [folder.name for root in sync._roots for folder in root.iterdir()] == ["3"]
    await rollout.unload_adapter()
    assert not [folder for root in sync._roots for folder in root.iterdir()]
    sync.close()
    assert not any(root.exists() for root in sync._roots)


def test_the_disk_strategy_goes_where_there_is_room(
    running: AsyncRollout, spec: RolloutSpec, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
):
    sync = DiskSync(spec.workdir)
    plain = AsyncRollout(running.engine, spec, sync, running.served)._prepare(adapter(1))
    small = sync.next_folder(plain)
    free = {root: 0 if root == sync._roots[0] else 1 << 40 for root in sync._roots}
    monkeypatch.setattr(shutil, "disk_usage", lambda root: SimpleNamespace(free=free[root]))
    assert sync.next_folder(plain).parent == sync._roots[-1]
    assert small.parent == sync._roots[0]
    sync.close()


@pytest.fixture
def no_process_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not [child.cmdline() for child in alive]


async def test_closing_aborts_what_runs_and_leaves_nothing_behind(
    no_process_left: None, spec: RolloutSpec, adapter: MakeAdapter
):
    async with make(spec, sync="disk") as rollout:
        await rollout.update_adapter(adapter(1, rank=1))
        assert (await rollout.generate(REQUEST)).finish_reason == "length"
        task = asyncio.ensure_future(rollout.generate(replace(REQUEST, max_tokens=900)))
        await asyncio.sleep(0.2)
        await rollout.close()
        with pytest.raises(RolloutClosedError, match="closed while this request ran"):
            await task
        await rollout.close()
        for call in (
            rollout.generate(REQUEST),
            rollout.update_adapter(adapter(2)),
            rollout.loaded_adapters(),
        ):
            with pytest.raises(RolloutClosedError, match="start another with make"):
                await asyncio.wait_for(call, 10)


async def test_an_update_that_waits_its_turn_ends_when_the_rollout_closes(
    running: AsyncRollout, spec: RolloutSpec, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
):
    rollout = AsyncRollout(running.engine, spec, TensorSync(), running.served)
    rollout.sync = held = Held(rollout.sync)
    monkeypatch.setattr(running.engine, "shutdown", lambda: None)
    first = asyncio.ensure_future(rollout.update_adapter(adapter(1)))
    await held.started.wait()
    second = asyncio.ensure_future(rollout.update_adapter(adapter(2)))
    closing = asyncio.ensure_future(rollout.close())
    await asyncio.sleep(0.1)
    assert not closing.done()
    held.go.set()
    await first
    await closing
    with pytest.raises(RolloutClosedError):
        await second
    await running.engine.remove_lora(rollout.lora_int_id)


def test_a_missing_model_folder_is_named(spec: RolloutSpec):
    with pytest.raises(FileNotFoundError, match="no model at 'nowhere': it has to be a Hugging Face folder"):
        start_engine(replace(spec, model_path="nowhere"))


async def test_an_unknown_strategy_is_refused_before_the_engine_starts(spec: RolloutSpec):
    with pytest.raises(ValueError, match="sync is 'telepathy'; allowed: disk, tensors, arena, fold, auto"):
        async with make(spec, sync="telepathy"):
            pass
