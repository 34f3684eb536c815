"""What wakes a rollout from a deep sleep, on any device: base weights and adapter are read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import MakeAdapter
from rollproof.protocol import GenerateRequest, RolloutSpec
from rollproof_reference import AsyncRollout, start_engine
from rollproof_reference.start import WITH_LORA, strategy_for
from rollproof_reference.sync import Sync
from rollproof_reference.sync.tensors import TensorSync

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's engine sleeps")

REQUEST = GenerateRequest(tuple(range(7, 47)), 12)
BASE = GenerateRequest(tuple(range(8, 48)), 12, adapter=False)


@pytest.mark.parametrize("extension", ["Forgetful", "Older"])
async def test_lost_weights_are_read_again(extension: str, spec: RolloutSpec, adapter: MakeAdapter):
    engine = start_engine(spec, worker_extension_cls=f"sleeping.{extension}", enable_prefix_caching=False)
    worker = (await engine.collective_rpc("rollproof_describe"))[0]
    try:
        for version, name in enumerate(WITH_LORA, 1):
            sync = strategy_for(name, spec, worker)
            await through_a_loss(AsyncRollout(engine, spec, sync, worker["served"]), sync, adapter, version)
    finally:
        engine.shutdown()


async def through_a_loss(rollout: AsyncRollout, sync: Sync[Any], adapter: MakeAdapter, version: int) -> None:
    await rollout.update_adapter(adapter(version))
    before = [await rollout.generate(request) for request in (REQUEST, BASE)]
    await rollout.engine.collective_rpc("forget_weights")
    assert [await rollout.generate(request) for request in (REQUEST, BASE)] != before
    await rollout.engine.collective_rpc("rollproof_reload")
    await sync.restore(rollout.engine, rollout.lora_name, rollout.lora_int_id)
    assert [await rollout.generate(request) for request in (REQUEST, BASE)] == before
    await rollout.unload_adapter()
    sync.close()


async def test_a_rollout_that_sleeps_serves_nothing(running: AsyncRollout, spec: RolloutSpec):
    rollout = AsyncRollout(running.engine, spec, TensorSync(), running.served)
    with pytest.raises(ValueError, match="level is 3; allowed: 1, 2"):
        await rollout.sleep(3)
    with pytest.raises(RuntimeError, match="the rollout doesn't sleep"):
        await rollout.wake()
    rollout._asleep = 1
    for call in (rollout.generate(REQUEST), rollout.loaded_adapters(), rollout.sleep(1)):
        with pytest.raises(RuntimeError, match="the rollout sleeps at level 1; wake it first"):
            await call
