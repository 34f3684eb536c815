"""A rollout under test: started, called and ended under deadlines, with every call on record.

Whatever the rollout does wrong on the way, raising, hanging or breaking the protocol's form, comes
out as a FailureError that says so. Nothing here judges numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from .history import Exchange, History
from .outcome import FailureError, RaisedError
from .protocol import (
    Adapter,
    Capability,
    Completion,
    GenerateRequest,
    LoadedAdapter,
    Rollout,
    RolloutSpec,
)

Start = Callable[[RolloutSpec], AbstractAsyncContextManager[Rollout]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a call may take before it counts as hung, all scaled together.

    Only what leaves the event loop running can be cut short.
    """

    scale: float = 1.0
    start: float = 600.0
    generate: float = 120.0
    update: float = 120.0
    inventory: float = 60.0
    sleep: float = 120.0
    close: float = 60.0


class Subject:
    """One rollout from start to end. ``spec`` is what it honoured of what it was asked."""

    def __init__(self, start: Start, spec: RolloutSpec, history: History, deadlines: Deadlines) -> None:
        self.spec = spec
        self.history = history
        self.capabilities: frozenset[Capability] = frozenset()
        self.inventory_bound = 1
        self.routes: tuple[str, ...] = ("default",)
        self.sleep_levels: tuple[int, ...] = (1, 2)
        self.details: dict[str, str] = {}
        self._start = start
        self._deadlines = deadlines
        self._stop = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._rollout: Rollout | None = None

    async def open(self) -> None:
        """Start the rollout and read what it declares."""
        ready: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        # The context is entered and left in one task, which contexts may rely on.
        self._life = asyncio.create_task(self._live(ready))
        rollout = await self._within("start", lambda: ready)
        declared = getattr(rollout, "capabilities", None)
        if not isinstance(declared, frozenset | set):
            raise FailureError(f"the rollout's capabilities are {declared!r}: not a frozenset", fatal=True)
        try:
            self.capabilities = frozenset(Capability(item) for item in declared)
        except ValueError as error:
            known = ", ".join(sorted(Capability))
            raise FailureError(f"capabilities: {error}; there are {known}", fatal=True) from None
        self.spec = getattr(rollout, "spec", self.spec)
        self.inventory_bound = int(getattr(rollout, "inventory_bound", 1))
        self.routes = self._declared_routes(rollout)
        self.sleep_levels = tuple(getattr(rollout, "sleep_levels", self.sleep_levels))
        self.details = {str(k): str(v) for k, v in getattr(rollout, "details", {}).items()}
        self._rollout = rollout

    async def close(self) -> None:
        """End the rollout, however far it came."""
        self._rollout = None
        self._stop.set()
        if self._life is not None:
            life, self._life = self._life, None
            await self._within("close", lambda: life)

    def has(self, capability: Capability) -> bool:
        """Whether the rollout declares a capability."""
        return capability in self.capabilities

    async def generate(self, request: GenerateRequest) -> Exchange:
        """One completion."""
        with self.history.asking(request) as started:
            completion = await self._within("generate", lambda: self._running.generate(request))
            self._check_form(request, completion)
        return self.history.request_ended(request, started, completion)

    async def update(self, adapter: Adapter) -> Exception | None:
        """Send an adapter; return what the rollout raised if it refused."""
        update = self.history.update_started(adapter)
        refusal: Exception | None = None
        try:
            await self._within("update", lambda: self._running.update_adapter(adapter), refusable=True)
        except FailureError as error:  # it hangs: whether it was applied isn't known
            self.history.update_ended(update, error)
            raise
        except Exception as error:
            refusal = error
        self.history.update_ended(update, refusal)
        return refusal

    async def loaded(self) -> list[LoadedAdapter]:
        """What the rollout says is loaded."""
        found = list(await self._within("inventory", lambda: self._running.loaded_adapters()))
        self.history.inventory(found)
        return found

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Exchange]:
        """Several completions of one prompt."""
        method = self._method(Capability.SAMPLES, "generate_n")
        with self.history.asking(request, samples=n) as started:
            found = await self._within("generate", lambda: method(request, n))
            if not isinstance(found, list | tuple) or len(found) != n:
                count = f"{len(found)} completions" if isinstance(found, list | tuple) else repr(type(found))
                raise FailureError(f"generate_n returned {count} for n={n}")
            for completion in found:
                self._check_form(request, completion)
        return [self.history.request_ended(request, started, completion) for completion in found]

    async def prompt_logprobs(self, request: GenerateRequest) -> tuple[float, ...]:
        """The logprob of each prompt token but the first."""
        method = self._method(Capability.PROMPT_LOGPROBS, "prompt_logprobs")
        started = self.history.note("scoring started", request=request.to_json())
        found = await self._within("generate", lambda: method(request))
        wanted = len(request.prompt_token_ids) - 1
        if not isinstance(found, list | tuple) or len(found) != wanted:
            count = f"{len(found)} numbers" if isinstance(found, list | tuple) else repr(type(found))
            raise FailureError(
                f"prompt_logprobs returned {count} for {wanted + 1} tokens; it has to be {wanted}"
            )
        if bad := [value for value in found if not isinstance(value, float) or not math.isfinite(value)]:
            raise FailureError(f"prompt_logprobs returned {bad[0]!r}: not a finite float")
        self.history.note("scoring ended", started=started, prompt_logprobs=list(found))
        return tuple(found)

    async def unload(self) -> None:
        """Go back to the time before the first update."""
        method = self._method(Capability.UNLOAD, "unload_adapter")
        update = self.history.unload_started()
        try:
            await self._within("update", method)
        except FailureError as error:
            self.history.update_ended(update, error)
            raise
        self.history.update_ended(update)

    async def sleep(self, level: int) -> None:
        """Free the device's memory until ``wake``."""
        method = self._method(Capability.SLEEP, "sleep")
        self.history.note("sleep started", level=level)
        await self._within("sleep", lambda: method(level))
        self.history.note("sleep ended", level=level)

    async def wake(self) -> None:
        """Serve again."""
        method = self._method(Capability.SLEEP, "wake")
        self.history.note("wake started")
        await self._within("sleep", method)
        self.history.note("wake ended")

    async def counters(self) -> dict[str, int]:
        """What was counted so far."""
        found = await self._within("inventory", self._method(Capability.COUNTERS, "counters"))
        counted = {str(name): value for name, value in dict(found).items()}
        if bad := {name: value for name, value in counted.items() if not isinstance(value, int) or value < 0}:
            raise FailureError(f"counters returned {bad}: not whole numbers of at least 0")
        self.history.note("counters", counted=counted)
        return counted

    async def process_ids(self) -> list[int]:
        """The processes whose memory is the rollout's."""
        found = list(await self._within("inventory", self._method(Capability.PROCESSES, "process_ids")))
        if not found or not all(isinstance(item, int) for item in found):
            raise FailureError(f"process_ids returned {found!r}: not the ids of one process or more")
        self.history.note("processes", ids=found)
        return sorted(set(found))

    def _method(self, capability: Capability, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._running, name, None)
        if not callable(method):
            raise FailureError(f"the rollout declares {capability} and has no method {name}")
        found: Callable[..., Awaitable[Any]] = method
        return found

    def _declared_routes(self, rollout: Rollout) -> tuple[str, ...]:
        if not self.has(Capability.ROUTES):
            return self.routes
        routes = getattr(rollout, "routes", None)
        if not isinstance(routes, list | tuple) or not routes or not all(isinstance(r, str) for r in routes):
            raise FailureError(
                f"the rollout declares routes, and its attribute routes is {routes!r}: it has to name them",
                fatal=True,
            )
        return tuple(routes)

    @property
    def _running(self) -> Rollout:
        if self._rollout is None:
            raise FailureError("the rollout is not running", fatal=True)
        return self._rollout

    async def _live(self, ready: asyncio.Future[Rollout]) -> None:
        try:
            async with self._start(self.spec) as rollout:
                ready.set_result(rollout)
                await self._stop.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _within(self, what: str, call: Callable[[], Awaitable[_T]], *, refusable: bool = False) -> _T:
        """Make a call and await it for as long as it may take; an overdue one is left behind."""
        seconds = getattr(self._deadlines, what) * self._deadlines.scale
        try:
            task = asyncio.ensure_future(call())
        except Exception as error:
            raise RaisedError(f"{what} raised {told(error)}", fatal=True) from error
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise FailureError(f"{what} did not return within {seconds:g} s: it hangs", fatal=True)
        if task.cancelled():
            raise FailureError(f"{what} was cancelled inside the rollout", fatal=True)
        try:
            return task.result()
        except Exception as error:
            if refusable:
                raise
            raise RaisedError(f"{what} raised {told(error)}", fatal=True) from error

    def _check_form(self, request: GenerateRequest, completion: Completion) -> None:
        if not isinstance(completion, Completion):
            raise FailureError(f"generate returned a {type(completion).__name__}, not a Completion")
        n_tokens, most = len(completion.token_ids), request.max_tokens
        if completion.finish_reason == "abort" and self.has(Capability.ABORT_IN_FLIGHT):
            least = 0
        else:
            least = 1 if completion.finish_reason == "stop" else most
        if not least <= n_tokens <= most:
            raise FailureError(
                f"{n_tokens} tokens came back for max_tokens={most} with finish_reason "
                f"{completion.finish_reason!r}"
            )
        if completion.logprobs is None:
            if self.has(Capability.LOGPROBS):
                raise FailureError("the rollout declares logprobs, and a completion came without them")
        elif len(completion.logprobs) != n_tokens:
            raise FailureError(f"{len(completion.logprobs)} logprobs came back for {n_tokens} tokens")


def told(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
