"""What a bare history can be judged for: which of its completions speak for which clause.

Decided from the order of calls alone; nothing here knows a model or an adapter's tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from .candidates import BASE, Candidate, on_stale_kv
from .history import Exchange, History, Unanswered, Update
from .outcome import Outcome
from .protocol import Capability

UNSAID = {
    "SYNC-001": "no adapter request was answered before the first update",
    "SYNC-002": "no adapter request ran between the first update and the second",
    "BASE-001": "no base request ran alone after an update",
    "SYNC-003": "no adapter request began after a second update and ended before the next",
    "BASE-002": "no base request ran beside an adapter request after an update",
    "CACHE-001": "no adapter request reused KV after an update, as num_cached_tokens would say",
    "FLIGHT-001": "no adapter request was overtaken by an update",
    "FLIGHT-002": "no request ran beside an update",
}
"""The clauses that a history can speak for, in their order, and why one of them may not be."""


_Key = tuple[str, int, int]
"""A clause, and the claim's ``after`` and ``last``."""


@dataclass(frozen=True)
class Claim:
    """Completions that speak for one clause together.

    ``after`` and ``last`` are indices into ``serving``: of the newest update that had begun when they
    started, and when they ended (-1: none had).
    """

    clause: str
    what: str
    exchanges: tuple[Exchange, ...]
    after: int
    last: int


def serving(history: History) -> list[Update]:
    """The updates that may have served a request: those that did not raise."""
    return [update for update in history.updates if update.error is None]


class Spans:
    """Calls by when they ran, each from a start to an end that may never have come."""

    def __init__(self, spans: Iterable[tuple[int, int | None]]) -> None:
        ordered = sorted((start, inf if end is None else end) for start, end in spans)
        self._starts = [start for start, _ in ordered]
        self._latest = list(accumulate((end for _, end in ordered), max))

    def begun(self, tick: int) -> int:
        """How many had begun before a place in the history."""
        return bisect_left(self._starts, tick)

    def beside(self, call: Exchange | Unanswered) -> bool:
        """Whether one ran while this call did."""
        begun = self.begun(call.ended)
        return begun > 0 and self._latest[begun - 1] > call.started


def updating(history: History) -> Spans:
    """When updates ran."""
    return Spans((u.started, u.ended) for u in serving(history))


def claims(history: History) -> list[Claim]:
    """Everything that can be claimed, in the order of the updates."""
    updates, running = serving(history), updating(history)
    asked = [(e.started, e.ended) for e in history.exchanges if e.request.adapter]
    asked += [(u.started, u.ended) for u in history.unanswered if u.request.adapter]
    endless = [(started, None) for started, (request, _) in history.running.items() if request.adapter]
    adapter_requests = Spans([*asked, *endless])
    found: dict[_Key, list[Exchange]] = {}
    reused: dict[_Key, list[Exchange]] = {}
    for e in sorted(history.exchanges, key=lambda e: e.ended):
        if not e.completion.token_ids:
            continue
        after, last = running.begun(e.started) - 1, running.begun(e.ended) - 1
        clause = _clause(e, after, last, running, adapter_requests)
        if clause:
            found.setdefault((clause, after, last), []).append(e)
        if clause.startswith("SYNC") and last >= 0 and e.completion.num_cached_tokens:
            reused.setdefault(("CACHE-001", after, last), []).append(e)
    _leave_reused(found)
    return [
        Claim(clause, _what(updates, after, last), tuple(exchanges), after, last)
        for (clause, after, last), exchanges in sorted([*found.items(), *reused.items()], key=_place)
        if exchanges
    ]


def stale(updates: Sequence[Update], claim: Claim, e: Exchange) -> Candidate | None:
    """The KV of the version before under the newest, as far as the rollout says that KV was reused."""
    newer = updates[claim.after].version
    older = updates[claim.after - 1].version if claim.after > 0 else BASE
    kept = min(e.completion.num_cached_tokens or 0, len(e.request.prompt_token_ids) - 1)
    return on_stale_kv(older, newer, kept) if kept > 0 and older != newer else None


def lost(history: History, in_flight: Capability | None) -> tuple[Outcome, str]:
    """Whether every request came to an end, and beside an update to no error but an admitted one."""
    if history.closed and history.running:
        return Outcome.FAIL, (
            f"{len(history.running)} requests never ended, though the record was closed; the first is "
            f"request {min(history.running)} of the history"
        )
    raised = raised_beside(history)
    if raised and in_flight not in (None, Capability.ABORT_IN_FLIGHT):
        return Outcome.FAIL, (
            f"{len(raised)} requests beside an update raised; request {raised[0].started} of the history: "
            f"{' '.join(raised[0].error.split())}"
        )
    answered = sum(map(updating(history).beside, history.exchanges))
    if not answered:
        return Outcome.NOT_APPLICABLE, UNSAID["FLIGHT-002"]
    running = f"; {len(history.running)} were running when the record broke off" if history.running else ""
    return Outcome.PASS, f"{answered} requests ran beside an update, and each was answered{running}"


def aborted(history: History) -> int:
    """Requests beside an update that ended as abort-in-flight says: by raising, or cut short."""
    beside = updating(history).beside
    short = sum(e.completion.finish_reason == "abort" and beside(e) for e in history.exchanges)
    return len(raised_beside(history)) + short


def raised_beside(history: History) -> list[Unanswered]:
    """Requests that raised while an update ran; those that were cancelled did as they were told."""
    beside = updating(history).beside
    return [u for u in history.unanswered if not _cancelled(u) and beside(u)]


def refused_before(history: History) -> int:
    """Adapter requests that raised before the first update."""
    begun = updating(history).begun
    return sum(u.request.adapter and not _cancelled(u) and not begun(u.ended) for u in history.unanswered)


def _cancelled(call: Unanswered) -> bool:
    return call.error.startswith("CancelledError")


def _clause(e: Exchange, after: int, last: int, updating: Spans, adapter_requests: Spans) -> str:
    if not e.request.adapter:
        if last < 0:
            return ""
        return "BASE-002" if adapter_requests.beside(e) else "BASE-001"
    if last < 0:
        return "SYNC-001"
    if updating.beside(e):
        return "FLIGHT-001"
    return "SYNC-002" if after == 0 else "SYNC-003"


def _leave_reused(found: dict[_Key, list[Exchange]]) -> None:
    """Leave completions on reused KV to CACHE-001, where others speak for SYNC."""
    for clause in ("SYNC-002", "SYNC-003"):
        mine = [exchanges for (of, *_), exchanges in found.items() if of == clause]
        if any(not e.completion.num_cached_tokens for exchanges in mine for e in exchanges):
            for exchanges in mine:
                exchanges[:] = [e for e in exchanges if not e.completion.num_cached_tokens]


def _place(item: tuple[_Key, list[Exchange]]) -> tuple[int, int]:
    return item[0][1:]


def _what(updates: Sequence[Update], after: int, last: int) -> str:
    if last < 0:
        return "before the first update"
    called = ["the adapter was taken away" if u.version == BASE else f"version {u.version}" for u in updates]
    if last == after:
        return f"after {called[after]}"
    return f"beside the update to {called[last]}" if updates[last].version else f"as {called[last]}"
