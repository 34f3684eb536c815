"""What happened, in order: every call to a rollout with its answer, as JSON lines.

The judge decides from this record, so it holds what was asked and what came back, and nothing that
was concluded. Adapters are named by version and digest; their tensors stay out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from .candidates import BASE
from .protocol import Adapter, Capability, Completion, GenerateRequest, LoadedAdapter

FORMAT = 1
"""The version of the lines. It grows when an older reader would misread them."""


@dataclass
class Update:
    """One ``update_adapter`` call, or with the version BASE one of ``unload_adapter``.

    ``ended`` is None while it runs; ``error`` is what it raised; ``digest`` is the adapter's.
    """

    version: int
    started: int
    ended: int | None = None
    error: str | None = None
    digest: str = ""


@dataclass(frozen=True)
class Exchange:
    """One answered ``generate`` call. ``started`` and ``ended`` are places in the history's order."""

    request: GenerateRequest
    completion: Completion
    started: int
    ended: int


@dataclass(frozen=True)
class Unanswered:
    """One ``generate`` call that raised."""

    request: GenerateRequest
    started: int
    ended: int
    error: str


@dataclass(frozen=True)
class Served:
    """Versions in the order of their updates: ``at_start`` may have been the newest when a request
    started, ``later`` are those whose updates began while it ran."""

    at_start: tuple[int, ...]
    later: tuple[int, ...]


@dataclass
class History:
    """The record of one rollout's life. Times are places in one order: 0, 1, 2, ...

    ``life`` counts the rollouts whose records share a file, from 1. ``running`` are the requests without
    an end, by the place of their start, each with the number of completions that are to come. ``dtype``
    and ``in_flight`` are what the rollout said, "" and None where it said nothing. ``closed``: nothing
    was left out at the end.
    """

    updates: list[Update] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    unanswered: list[Unanswered] = field(default_factory=list)
    running: dict[int, tuple[GenerateRequest, int]] = field(default_factory=dict)
    dtype: str = ""
    in_flight: Capability | None = None
    closed: bool = False
    life: int = 1
    stream: TextIO | None = field(default=None, compare=False)
    _tick: int = field(default=0, compare=False)

    def begin(self, dtype: str, in_flight: Capability | None, **values: Any) -> None:
        """Write the first line: what is needed to judge the rest, and whatever else is told."""
        self.dtype, self.in_flight = dtype, in_flight
        self.note("rollout started", format=FORMAT, dtype=dtype, in_flight=in_flight, **values)

    def close(self) -> None:
        """Write the last line: whatever has not ended by now never did."""
        self.closed = True
        self.note("record closed")

    def note(self, event: str, **values: Any) -> int:
        """Write one line and return its place in the order."""
        tick, self._tick = self._tick, self._tick + 1
        if self.stream is not None:
            line = {"tick": tick, "unix_seconds": round(time.time(), 6), "event": event, **values}
            self.stream.write(json.dumps(line) + "\n")
            self.stream.flush()
        return tick

    def update_started(self, adapter: Adapter) -> Update:
        """Record that an update was asked for."""
        digest = adapter.digest()
        tick = self.note(
            "update started",
            version=adapter.version,
            digest=digest,
            config={"r": adapter.config.r, "lora_alpha": adapter.config.lora_alpha},
        )
        update = Update(adapter.version, tick, digest=digest)
        self.updates.append(update)
        return update

    def update_ended(self, update: Update, error: BaseException | None = None) -> None:
        """Record how an update came out."""
        update.error = None if error is None else _told(error)
        update.ended = self.note(
            "update ended", version=update.version, started=update.started, error=update.error
        )

    def unload_started(self) -> Update:
        """Record that the adapter has to go: from then on the base model is the newest version."""
        update = Update(BASE, self.note("unload started"))
        self.updates.append(update)
        return update

    def request_started(self, request: GenerateRequest, samples: int = 1) -> int:
        """Record that a completion was asked for, or several of one prompt."""
        started = self.note("request started", request=request.to_json(), samples=samples)
        self.running[started] = request, samples
        return started

    def request_ended(self, request: GenerateRequest, started: int, completion: Completion) -> Exchange:
        """Record a completion."""
        ended = self.note("request ended", started=started, completion=completion.to_json())
        return self._answered(request, started, completion, ended)

    def request_failed(self, request: GenerateRequest, started: int, error: BaseException) -> None:
        """Record that a request raised, or was cancelled."""
        ended = self.note("request failed", started=started, error=_told(error))
        self.running.pop(started, None)
        self.unanswered.append(Unanswered(request, started, ended, _told(error)))

    @contextmanager
    def asking(self, request: GenerateRequest, samples: int = 1) -> Iterator[int]:
        """Record a request's start, which is given, and that it failed if the block raises."""
        started = self.request_started(request, samples)
        try:
            yield started
        except BaseException as error:
            self.request_failed(request, started, error)
            raise

    def _answered(
        self, request: GenerateRequest, started: int, completion: Completion, ended: int
    ) -> Exchange:
        asked, left = self.running.pop(started, (request, 1))
        if left > 1:
            self.running[started] = asked, left - 1
        exchange = Exchange(request, completion, started, ended)
        self.exchanges.append(exchange)
        return exchange

    def inventory(self, loaded: list[LoadedAdapter]) -> None:
        """Record what the rollout said is loaded."""
        self.note("inventory", loaded=[[item.name, item.int_id, item.rank] for item in loaded])

    def served(self, exchange: Exchange) -> Served:
        """The versions that may have served a request, by the protocol's promise.

        An update that returned before the request started replaced all before it; one that raised
        never serves.
        """
        if not exchange.request.adapter:
            return Served((BASE,), ())
        before, at_start, later = BASE, list[int](), list[int]()
        for update in self.updates:
            if update.error is not None:
                continue
            if update.ended is not None and update.ended < exchange.started:
                before = update.version
            elif update.started < exchange.started:
                at_start.append(update.version)
            elif update.started < exchange.ended:
                later.append(update.version)
        return Served((before, *at_start), tuple(later))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
