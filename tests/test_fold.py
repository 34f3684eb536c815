"""The reference with sync=fold on a real engine: exactly the merged weights, and exactly the base's again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from conftest import MakeAdapter
from rollproof.candidates import BASE
from rollproof.judge import rms
from rollproof.models import make_adapter
from rollproof.oracle import Oracle, Sample
from rollproof.protocol import Adapter, Capability, Completion, GenerateRequest, RolloutSpec
from rollproof_reference import AdapterError, AsyncRollout, RankError, make
from rollproof_reference.sync.fold import FoldSync

REQUEST = GenerateRequest(tuple(range(7, 47)), 12)


@pytest.fixture
def oracle(model_path: Path, spec: RolloutSpec) -> Oracle:
    return Oracle(model_path, getattr(torch, spec.dtype))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def folding(spec: RolloutSpec) -> AsyncIterator[AsyncRollout]:
    """One engine for all tests here, which leave it unfolded. It computes every prompt anew, so that equal
    weights give equal bits."""
    async with make(spec, sync="fold", enable_prefix_caching="false") as rollout:
        yield rollout


@pytest_asyncio.fixture(loop_scope="session", params=["device", "host"])
async def rollout(
    request: pytest.FixtureRequest, folding: AsyncRollout, spec: RolloutSpec
) -> AsyncIterator[AsyncRollout]:
    """A rollout of its own on that engine, with its copies in either place."""
    worker = (await folding.engine.collective_rpc("rollproof_describe"))[0]
    sync = FoldSync(worker, request.param)
    own = AsyncRollout(folding.engine, spec, sync, worker["served"], worker["unserved"])
    yield own
    await own.unload_adapter()


def assert_served(oracle: Oracle, version: int, completion: Completion) -> None:
    """Completions of REQUEST have the logprobs of this version's merged weights, and of no other's."""
    assert completion.logprobs is not None
    sample = Sample(REQUEST.prompt_token_ids, completion.token_ids)
    observed = torch.tensor(completion.logprobs)
    apart = {v: rms(observed - oracle.score(v, [sample])[0].logprobs).item() for v in oracle.versions}
    tolerance = 1e-4 if oracle.dtype == torch.float32 else 0.1
    assert apart[version] < tolerance, apart
    assert all(far > 5 * tolerance for other, far in apart.items() if other != version), apart


def on(weights: dict[str, torch.Tensor], version: int, **options: Any) -> Adapter:
    generator = torch.Generator().manual_seed(version)
    return make_adapter(weights, version, generator, strength=0.5, **options)


def with_dora(oracle: Oracle, version: int) -> Adapter:
    """An adapter whose magnitudes have moved too."""
    config, state = oracle.peft_state(use_dora=True, r=4, target_modules=["q_proj", "up_proj"])
    generator = torch.Generator().manual_seed(version)
    tensors = {
        name: tensor * 1.3
        if "magnitude" in name
        else torch.randn(tensor.shape, generator=generator) / len(tensor) ** 0.5
        for name, tensor in state.items()
    }
    return Adapter(version, config, tensors)


async def test_each_update_serves_exactly_what_is_merged(rollout: AsyncRollout, oracle: Oracle):
    assert_served(oracle, BASE, await rollout.generate(REQUEST))
    layers = oracle.layers()
    adapters = [
        on(layers, 1),
        on(layers, 2, rank=24, use_rslora=True),
        on(layers, 3, rank=4, rank_pattern={"q_proj": 9}, alpha_pattern={"down_proj": 3.0}),
        with_dora(oracle, 4),
        on(oracle.head(), 5),
        on(oracle.embedding(), 6, embedding=True),
        on(layers, 7, rank=1, target_modules=["v_proj"]),
    ]
    for adapter in adapters:
        oracle.add(adapter)
        await rollout.update_adapter(adapter)
        completion = await rollout.generate(REQUEST)
        assert_served(oracle, adapter.version, completion)
        assert completion.version_spans == ((0, adapter.version),)


async def test_unloading_gives_the_base_model_back_bit_for_bit(rollout: AsyncRollout, adapter: MakeAdapter):
    before = await rollout.generate(REQUEST)
    for version in range(1, 6):
        await rollout.update_adapter(adapter(version))
    assert await rollout.generate(REQUEST) != before
    await rollout.unload_adapter()
    assert await rollout.generate(REQUEST) == before


async def test_nothing_drifts_and_nothing_is_left_of_other_adapters(
    rollout: AsyncRollout, adapter: MakeAdapter
):
    narrow = adapter(1, target_modules=["q_proj"])
    await rollout.update_adapter(narrow)
    once = await rollout.generate(REQUEST)
    for version in range(2, 20):
        await rollout.update_adapter(adapter(version, rank=version))
    await rollout.update_adapter(Adapter(20, narrow.config, narrow.tensors))
    again = await rollout.generate(REQUEST)
    assert (again.token_ids, again.logprobs) == (once.token_ids, once.logprobs)


async def test_a_refused_update_changes_nothing(rollout: AsyncRollout, adapter: MakeAdapter):
    await rollout.update_adapter(adapter(1))
    before = await rollout.generate(REQUEST)
    good = adapter(2, rank=4)
    for factor, error in ((float("nan"), AdapterError), (1e25, Exception)):
        tensors = {name: tensor * factor for name, tensor in good.tensors.items()}
        with pytest.raises(error, match=r"NaN or infinite|aren't finite in torch"):
            await rollout.update_adapter(Adapter(2, good.config, tensors))
        assert await rollout.generate(REQUEST) == before
    with pytest.raises(RankError, match="rank 25 is above 24"):
        await rollout.update_adapter(adapter(2, rank=25))
    await rollout.update_adapter(good)
    assert await rollout.generate(REQUEST) != before


async def test_an_update_without_room_for_its_copies_is_refused(
    rollout: AsyncRollout, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
):
    await rollout.update_adapter(adapter(1, target_modules=["q_proj"]))
    before = await rollout.generate(REQUEST)
    ask = rollout.engine.collective_rpc

    async def cramped(method: str, *args: Any, **kwargs: Any) -> Any:
        found = await ask(method, *args, **kwargs)
        return [one | {"room": 1000} for one in found] if method == "rollproof_open_folds" else found

    monkeypatch.setattr(rollout.engine, "collective_rpc", cramped)
    with pytest.raises(MemoryError, match=r"sync=fold takes .* GB for unchanged copies .*use pristine=host"):
        await rollout.update_adapter(adapter(2))
    assert await rollout.generate(REQUEST) == before
    # The copies of q_proj are there, so the same modules cost nothing more.
    await rollout.update_adapter(adapter(2, target_modules=["q_proj"], rank=16))


async def test_a_version_comes_once(rollout: AsyncRollout, adapter: MakeAdapter):
    await rollout.update_adapter(adapter(2))
    await rollout.update_adapter(adapter(2))
    for other in (adapter(2, seed=1), adapter(2, lora_alpha=99)):
        with pytest.raises(AdapterError, match="version 2 came again with other tensors or another config"):
            await rollout.update_adapter(other)


async def test_the_base_model_is_served_before_the_first_update_alone(
    rollout: AsyncRollout, oracle: Oracle, adapter: MakeAdapter
):
    base = replace(REQUEST, adapter=False)
    assert_served(oracle, BASE, await rollout.generate(base))
    running = asyncio.ensure_future(rollout.generate(replace(base, max_tokens=900)))
    await asyncio.sleep(0.2)
    await rollout.update_adapter(adapter(1))
    for asked in (running, rollout.generate(base), rollout.prompt_logprobs(base)):
        with pytest.raises(RuntimeError, match="the base model can be served before the first update alone"):
            await asked
    assert not rollout._running
    await rollout.unload_adapter()
    assert_served(oracle, BASE, await rollout.generate(base))


async def test_what_it_can_not_do_is_not_declared(rollout: AsyncRollout):
    assert not rollout.capabilities & {Capability.BASE, Capability.INVENTORY, Capability.STABLE_ID}
    assert rollout.capabilities >= {Capability.EMBED_TOKENS, Capability.LM_HEAD, Capability.BASE_BEFORE_SYNC}
    with pytest.raises(RuntimeError, match="with sync=fold the engine knows of no adapter"):
        await rollout.loaded_adapters()


async def test_an_unknown_place_for_copies_is_refused_before_the_engine_starts(spec: RolloutSpec):
    with pytest.raises(ValueError, match="pristine is 'moon'; allowed: device, host"):
        async with make(spec, sync="fold", pristine="moon"):
            pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's engine sleeps")
@pytest.mark.parametrize("pristine", ["device", "host"])
async def test_what_was_served_is_served_after_a_sleep(
    pristine: str, spec: RolloutSpec, adapter: MakeAdapter
):
    options = {"enable_sleep_mode": "true", "gpu_memory_utilization": "0.2", "enable_prefix_caching": "false"}
    async with make(spec, sync="fold", pristine=pristine, **options) as rollout:
        base = await rollout.generate(REQUEST)
        for version, level in enumerate((1, 2, 1, 2), 1):
            await rollout.update_adapter(adapter(version))
            before = await rollout.generate(REQUEST)
            await rollout.sleep(level)
            await rollout.wake()
            assert await rollout.generate(REQUEST) == before
        await rollout.unload_adapter()
        assert await rollout.generate(REQUEST) == base
        await rollout.sleep(2)
        await rollout.wake()
        assert await rollout.generate(REQUEST) == base
