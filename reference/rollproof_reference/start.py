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
from .sync.disk import DiskSync
from .sync.tensors import TensorSync

_log = logging.getLogger(__name__)


@asynccontextmanager
async def make(spec: RolloutSpec, sync: str = "disk", **engine: str) -> AsyncIterator[AsyncRollout]:
    """Start an engine and a rollout on it; both end with the context.

    ``sync`` is "disk" or "tensors"; further options go to vLLM's engine arguments, read as JSON
    where they are JSON (``enforce_eager=true``, ``gpu_memory_utilization=0.3``).
    """
    if sync not in ("disk", "tensors"):
        raise ValueError(f"sync is {sync!r}; allowed: disk, tensors")
    llm = start_engine(spec, **{key: _value(text) for key, text in engine.items()})
    rollout: AsyncRollout | None = None
    try:
        worker = (await llm.collective_rpc("rollproof_describe"))[0]
        if sync == "tensors" and worker["lacking"]:
            _log.warning(
                "this vLLM lacks %s, which updates from memory need; updating over the disk instead",
                ", ".join(worker["lacking"]),
            )
            sync = "disk"
        strategy = DiskSync(spec.workdir) if sync == "disk" else TensorSync()
        rollout = AsyncRollout(llm, spec, strategy, worker["served"])
        if worker["uncounted"]:
            _log.warning("this vLLM can't be counted in: %s", worker["uncounted"])
            rollout.capabilities -= {Capability.COUNTERS}
        yield rollout
    finally:
        if rollout is not None:
            await rollout.close()
        else:
            llm.shutdown()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
