"""Starting an engine and a rollout on it, as ``--rollout rollproof_reference:make`` does."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollproof.protocol import Capability, RolloutSpec

from .engine import start_engine
from .rollout import AsyncRollout
from .sync import Sync
from .sync.arena import ArenaSync
from .sync.disk import DiskSync
from .sync.fold import PRISTINE, FoldSync
from .sync.tensors import TensorSync

_log = logging.getLogger(__name__)

WITH_LORA = ("disk", "tensors", "arena")
"""The ways to bring an adapter into an engine with LoRA (see ``sync``)."""

SYNCS = (*WITH_LORA, "fold")
"""All ways; the others are for an engine that was started for them."""


@asynccontextmanager
async def make(
    spec: RolloutSpec, sync: str = "disk", pristine: str = "device", **engine: str
) -> AsyncIterator[AsyncRollout]:
    """Start an engine and a rollout on it; both end with the context.

    ``sync`` is "disk", "tensors", "arena" or "fold"; further options go to vLLM's engine arguments, read as
    JSON where they are JSON (``enforce_eager=true``, ``gpu_memory_utilization=0.3``). With "fold",
    ``pristine`` says where unchanged copies of the weights are kept: "device" or "host".
    """
    if sync not in SYNCS:
        raise ValueError(f"sync is {sync!r}; allowed: {', '.join(SYNCS)}")
    if pristine not in PRISTINE:
        raise ValueError(f"pristine is {pristine!r}; allowed: {', '.join(PRISTINE)}")
    merges = sync == "fold"
    llm = start_engine(spec, merges=merges, **{key: as_value(text) for key, text in engine.items()})
    rollout: AsyncRollout | None = None
    try:
        worker = (await llm.collective_rpc("rollproof_describe"))[0]
        if merges and worker["refused"]:
            raise ValueError(
                f"sync=fold can't serve this engine: {worker['refused']}; use sync=arena, tensors or disk"
            )
        if sync != "disk" and worker["lacking"]:
            _log.warning(
                "this vLLM lacks %s, which updates from memory need; updating over the disk instead",
                ", ".join(worker["lacking"]),
            )
            sync = "disk"
        strategy = FoldSync(worker, pristine) if merges else strategy_for(sync, spec, worker)
        rollout = AsyncRollout(llm, spec, strategy, worker["served"], worker.get("unserved"))
        if worker["uncounted"]:
            _log.warning("this vLLM can't be counted in: %s", worker["uncounted"])
            rollout.capabilities -= {Capability.COUNTERS}
        yield rollout
    finally:
        if rollout is not None:
            await rollout.close()
        else:
            llm.shutdown()


def strategy_for(sync: str, spec: RolloutSpec, worker: dict[str, Any]) -> Sync[Any]:
    """A strategy of this name for an engine with LoRA whose ``rollproof_describe`` gave ``worker``."""
    if sync == "disk":
        return DiskSync(spec.workdir)
    return TensorSync() if sync == "tensors" else ArenaSync(worker)


def as_value(text: str) -> Any:
    """An option as it was meant: JSON where it is JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
