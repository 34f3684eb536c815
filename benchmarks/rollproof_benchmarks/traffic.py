"""Many requests at once, and when each of their tokens came.

It knows no adapter: a rollout is what streams completions, and what happens beside them is given.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from rollproof.protocol import Completion, GenerateRequest

PROMPT_TOKENS = 64

REPEATS = 3
"""How often traffic is measured, to take the median."""


def requests(count: int, tokens: int, salt: int, *, adapter: bool = True) -> list[GenerateRequest]:
    """As an RL rollout asks: at temperature 1. Prompts share nothing, so that no cache helps."""
    return [
        GenerateRequest(
            tuple(3 + (i * 31 + j * 7 + salt * 13) % 499 for j in range(PROMPT_TOKENS)),
            tokens,
            temperature=1.0,
            adapter=adapter,
        )
        for i in range(count)
    ]


class Streams(Protocol):
    """What can give a completion in pieces, each as soon as it is there."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """One completion."""
        ...


@dataclass
class Traffic:
    """What came of some requests. Times are in seconds."""

    requested: int
    arrivals: list[list[tuple[float, int]]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many came."""
        return sum(count for stream in self.arrivals for _, count in stream)

    @property
    def lost(self) -> int:
        """How many did not."""
        return self.requested - self.tokens

    @property
    def full(self) -> tuple[float, float]:
        """From when on, and until when, every request was decoding."""
        return max(s[0][0] for s in self.arrivals), min(s[-1][0] for s in self.arrivals)

    @property
    def gaps(self) -> list[float]:
        """Times between successive pieces of a completion while every request was decoding."""
        begin, end = self.full
        return [
            after - before
            for stream in self.arrivals
            for (before, _), (after, _) in pairwise(stream)
            if begin <= before and after <= end
        ]

    @property
    def throughput(self) -> float:
        """Tokens per second while every request was decoding."""
        begin, end = self.full
        return sum(n for stream in self.arrivals for at, n in stream if begin < at <= end) / (end - begin)


async def run(
    rollout: Streams,
    requests: Sequence[GenerateRequest],
    beside: Callable[[], Awaitable[None]] | None = None,
) -> Traffic:
    """Ask all at once; once all are decoding, have ``beside`` go on until the first has ended."""
    traffic = Traffic(sum(request.max_tokens for request in requests))
    decoding, waiting = asyncio.Event(), len(requests)

    async def follow(request: GenerateRequest) -> None:
        nonlocal waiting
        arrivals: list[tuple[float, int]] = []
        traffic.arrivals.append(arrivals)
        async for piece in rollout.stream(request):
            arrivals.append((time.perf_counter(), len(piece.token_ids)))
            if len(arrivals) == 1:
                waiting -= 1
                if waiting == 0:
                    decoding.set()

    tasks = [asyncio.ensure_future(follow(request)) for request in requests]
    other: asyncio.Task[None] | None = None
    try:
        if beside is not None:
            await decoding.wait()
            other = asyncio.ensure_future(_repeat(beside))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if other is not None:
            other.cancel()
            await asyncio.wait([other])
            if not other.cancelled():
                other.result()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return traffic


async def _repeat(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await work()


def every(seconds: float, work: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """``work``, begun at most once in so many seconds, however long it takes itself."""

    async def timed() -> None:
        began = time.perf_counter()
        await work()
        await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - began)))

    return timed


def summary(values: Sequence[float]) -> dict[str, float]:
    """The median, the 95th percentile and the extremes, in milliseconds."""
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "min_ms": 1e3 * ordered[0],
        "median_ms": 1e3 * statistics.median(ordered),
        "p95_ms": 1e3 * ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "max_ms": 1e3 * ordered[-1],
    }
