"""Starting an engine and a rollout on it, as ``--rollout rollproof_reference:make`` does."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rollproof.protocol import Capability, RolloutSpec

from .choice import choose
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


class UnsuitedError(ValueError):
    """An engine that a strategy can't serve. The message says why, and what can."""


@asynccontextmanager
async def make(
    spec: RolloutSpec,
    sync: str = "disk",
    pristine: str = "device",
    tokens_per_update: str = "",
    **engine: str,
) -> AsyncIterator[AsyncRollout]:
    """Start an engine and a rollout on it; both end with the context.

    ``sync`` is "disk", "tensors", "arena", "fold", or "auto", which chooses between the last two by
    ``tokens_per_update`` (see ``choice.choose``) and says why in the rollout's ``details``. Further options
    go to vLLM's engine arguments, read as JSON where they are JSON (``enforce_eager=true``,
    ``gpu_memory_utilization=0.3``). With "fold", ``pristine`` says where unchanged copies of the weights
    are kept: "device" or "host".
    """
    if sync not in (*SYNCS, "auto"):
        raise ValueError(f"sync is {sync!r}; allowed: {', '.join(SYNCS)}, auto")
    if pristine not in PRISTINE:
        raise ValueError(f"pristine is {pristine!r}; allowed: {', '.join(PRISTINE)}")
    if tokens_per_update and not tokens_per_update.isdecimal():
        raise ValueError(f"tokens_per_update is {tokens_per_update!r}: it has to be a whole number")
    async with AsyncExitStack() as stack:

        async def started(name: str) -> AsyncRollout:
            return await stack.enter_async_context(_started(spec, name, pristine, engine))

        if sync != "auto":
            yield await started(sync)
            return
        name, why = choose(int(tokens_per_update) if tokens_per_update else None)
        try:
            rollout = await started(name)
        except UnsuitedError as error:
            why = str(error)
            rollout = await started("arena")
        rollout.details["sync"] += f" ({why})"
        _log.info("sync=auto: %s", rollout.details["sync"])
        yield rollout


@asynccontextmanager
async def _started(
    spec: RolloutSpec, sync: str, pristine: str, engine: dict[str, str]
) -> AsyncIterator[AsyncRollout]:
    merges = sync == "fold"
    llm = start_engine(spec, merges=merges, **{key: as_value(text) for key, text in engine.items()})
    rollout: AsyncRollout | None = None
    try:
        worker = (await llm.collective_rpc("rollproof_describe"))[0]
        if merges and worker["refused"]:
            raise UnsuitedError(
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
