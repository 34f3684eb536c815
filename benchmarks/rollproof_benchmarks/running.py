"""A rollout on an event loop that stands still unless something is awaited, for a benchmark's clock."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from typing import Any

from rollproof.factory import Target, load
from rollproof.protocol import RolloutSpec

WORKER = "rollproof_benchmarks.worker.TimedWorker"
FOLD_WORKER = "rollproof_benchmarks.fold_worker.TimedFoldWorker"


def reference(more: str = "", **options: str) -> Target:
    """The reference on weights that the engine makes up; ``more`` is key=value,key=value."""
    own = {"load_format": "dummy", **options}
    text = ",".join(["rollproof_reference:make", *(f"{key}={value}" for key, value in own.items())])
    return load(f"{text},{more}" if more else text)


class Running:
    """A rollout, and the loop that it lives on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rollout: Any, reference: bool) -> None:
        self.rollout = rollout
        self.reference = reference
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await something, with the loop standing still before and after."""
        return self._loop.run_until_complete(work)


def started(target: Target, spec: RolloutSpec, is_reference: bool) -> Iterator[Running]:
    """A rollout from start to end."""
    loop = asyncio.new_event_loop()
    context = target.start(spec)
    try:
        running = Running(loop, loop.run_until_complete(context.__aenter__()), is_reference)
        # As a server does after its start: collecting all that was imported stops every stream for a while.
        gc.collect()
        gc.freeze()
        yield running
        running.run(context.__aexit__(None, None, None))
    finally:
        gc.unfreeze()
        loop.close()
