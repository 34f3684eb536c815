"""Judging a history with its adapters, when no rollout runs any more.

Each clause that a bare history can speak for comes out as in a live run. No rollout, engine or file is
known here: adapters come from ``load``, and everything else from the history and the oracle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from .calibrate import LONGEST, Recorded
from .candidates import BASE, Candidate
from .claims import UNSAID, Claim, aborted, claims, lost, refused_before, serving, stale
from .history import Exchange, History, Update
from .judge import POWER, Tolerance
from .oracle import Oracle, Sample
from .outcome import FailureError, Outcome, Result, Witness, about
from .protocol import Adapter, Capability
from .reading import HistoryError
from .spec import clauses
from .verify import RIVALS, SIDE, Verifier

MOST = 32
"""So many completions of a claim are judged, chosen by the seed."""

LEAST = 8
"""So many of them have to tell the right version from all others, as in a live run; all, where fewer
were recorded."""

_SHOWN_ONCE = ("CACHE-001", "FLIGHT-001")
"""Clauses that a single completion shows, as in a live run."""

Load = Callable[[Update], Adapter]


def judge_history(
    history: History,
    oracle: Oracle,
    load: Load,
    *,
    in_flight: Capability | None = None,
    seed: int = 0,
    most: int = MOST,
    reproduce: str = "",
) -> list[Result]:
    """Every clause that a history can speak for, judged by the oracle of its model and dtype.

    ``load`` gives the adapter of an update. ``in_flight`` is the policy for overtaken requests where
    the history has none. ``most`` completions of each claim are judged, chosen by ``seed``. Raises
    HistoryError where history, adapters and model can't belong together.
    """
    judging = _Judging(history, oracle, load, in_flight or history.in_flight, seed, most)
    found = {clause_id: _Found() for clause_id in UNSAID}
    if serving(history):
        for claim in claims(history):
            judging.weigh(claim, found[claim.clause])
    results: list[Result] = []
    failed: set[str] = set()
    for clause in clauses():
        if clause.id not in found:
            continue
        mine = found[clause.id]
        # Only a failure blocks: what was judged stays true where another clause had too little to go by.
        if missing := sorted(failed.intersection(clause.requires)):
            outcome, message = Outcome.BLOCKED, f"requires {', '.join(missing)}, which did not pass"
        else:
            outcome, message = judging.outcome(clause.id, mine)
        if outcome in (Outcome.FAIL, Outcome.BLOCKED):
            failed.add(clause.id)
        results.append(
            Result(
                clause=clause.id,
                level=clause.level,
                outcome=outcome,
                message=message,
                seconds=round(mine.seconds, 3),
                seed=seed,
                reproduce=reproduce,
                completions=mine.judged,
                witness=[asdict(item) for item in mine.witness] if outcome == Outcome.FAIL else [],
            )
        )
    return results


@dataclass
class _Found:
    """What the claims of one clause came to so far."""

    recorded: int = 0
    judged: int = 0
    telling: int = 0
    used: float = 0.0
    """The largest distance from the right version, in parts of what is allowed."""

    claims: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    witness: tuple[Witness, ...] = ()
    weak: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    seconds: float = 0.0


class _Judging:
    """A history with its oracle, which holds the versions near those that are judged, and no others."""

    def __init__(
        self,
        history: History,
        oracle: Oracle,
        load: Load,
        in_flight: Capability | None,
        seed: int,
        most: int,
    ) -> None:
        self._history = history
        self._oracle = oracle
        self._load = load
        self._in_flight = in_flight
        self._generator = torch.Generator().manual_seed(seed)
        self._most = most
        self._updates = serving(history)
        self._digests = {BASE: ""}
        for update in self._updates:
            if self._digests.setdefault(update.version, update.digest) != update.digest:
                raise HistoryError(
                    f"version {update.version} was sent with two different adapters, so nobody can say which "
                    "one had to answer: give each adapter a version of its own"
                )
        self._recorded = self._measure(seed)

    def weigh(self, claim: Claim, found: _Found) -> None:
        """Judge one claim's completions, and add what came out."""
        found.recorded += len(claim.exchanges)
        if claim.clause == "FLIGHT-001" and self._in_flight is None:
            return
        began = time.monotonic()
        self._hold(claim)
        chosen = self._chosen(claim.exchanges)
        powers: dict[str, list[float]] = {}
        telling = 0
        try:
            for (n_tokens, wrong), exchanges in self._groups(claim, chosen).items():
                tolerance = self._tolerance(exchanges, n_tokens)
                verifier = Verifier(self._oracle, _Fixed(tolerance), self._history, self._in_flight)
                with about(claim.what):
                    verdict, scored, _ = verifier.weighed(exchanges, [] if wrong is None else [wrong])
                shows = [True] * len(exchanges)
                if claim.clause == "FLIGHT-001":
                    shows = verifier.shown(exchanges, scored)
                found.used = max(found.used, verdict.distance / tolerance.completion)
                for item, mine, show in zip(scored, verdict.powers, shows, strict=True):
                    for rival, power in mine.items():
                        powers.setdefault(item.called(rival), []).append(power)
                    telling += show and min(mine.values(), default=0.0) >= POWER
        except FailureError as failure:
            found.failures.append(str(failure))
            found.witness = found.witness or failure.witness
        found.claims.append(claim.what)
        found.judged += len(chosen)
        found.telling += telling
        if telling >= min(LEAST, len(chosen)):
            found.shown.append(claim.what)
        else:
            found.weak.append(_weak(claim.what, powers, len(chosen)))
        found.seconds += time.monotonic() - began

    def outcome(self, clause_id: str, found: _Found) -> tuple[Outcome, str]:
        """How a clause comes out, once all of its claims were weighed."""
        if clause_id == "FLIGHT-002":
            return lost(self._history, self._in_flight)
        if not self._updates:
            return Outcome.NOT_APPLICABLE, "no update succeeded, so there is nothing to tell apart"
        if found.failures:
            count = len(found.failures) - 1
            more = f" (so do {count} more claims of this clause)" if count else ""
            return Outcome.FAIL, found.failures[0] + more
        if clause_id == "FLIGHT-001":
            if self._in_flight is None:
                return Outcome.NOT_APPLICABLE, "neither the history nor --in-flight says what has to happen"
            if self._in_flight == Capability.ABORT_IN_FLIGHT:
                found.telling += aborted(self._history)
        if clause_id == "SYNC-001" and not found.recorded and (refused := refused_before(self._history)):
            return Outcome.PASS, f"{refused} adapter requests before the first update raised, as they may"
        if not found.recorded and not found.telling:
            return Outcome.NOT_APPLICABLE, UNSAID[clause_id]
        if clause_id == "FLIGHT-001" and not found.telling:
            return Outcome.ERROR, (
                f"underpowered: none of {found.judged} overtaken completions shows {self._in_flight}; a mix "
                f"takes {SIDE} tokens on either side that no other version could give"
            )
        if not found.recorded:
            return Outcome.PASS, f"{found.telling} requests beside an update were aborted"
        if not found.telling or (found.weak and clause_id not in _SHOWN_ONCE):
            shown = f"; shown {_some(found.shown)}" if found.shown else ""
            more = f"; {len(found.weak) - 1} more claims are" if len(found.weak) > 1 else ""
            return Outcome.ERROR, f"underpowered: {found.weak[0]}{more}{shown}"
        return Outcome.PASS, (
            f"{_some(found.claims)}: {found.judged} of {found.recorded} completions judged, "
            f"each within {found.used:.2f} of what is allowed; {found.telling} are shown to be no other "
            "candidate's"
        )

    def _hold(self, claim: Claim) -> None:
        """Have the oracle know the versions around a claim: those before it, its own, and the next."""
        window = self._updates[max(0, claim.after - RIVALS) : claim.last + 2]
        wanted = {update.version: update for update in window if update.version != BASE}
        for version in self._oracle.versions[1:]:
            if version not in wanted:
                self._oracle.forget(version)
        for version, update in wanted.items():
            if version not in self._oracle.versions:
                self._oracle.add(self._load(update))
                try:
                    self._oracle.score(version, [Sample((0,), (0,))])
                except (KeyError, RuntimeError, ValueError) as error:
                    raise HistoryError(
                        f"the adapter of version {version} doesn't fit the model: {error}"
                    ) from error

    def _groups(
        self, claim: Claim, exchanges: Sequence[Exchange]
    ) -> dict[tuple[int, Candidate | None], list[Exchange]]:
        """Completions of like length, which share a tolerance; for CACHE-001 of one stale candidate too."""
        groups: dict[tuple[int, Candidate | None], list[Exchange]] = {}
        for e in exchanges:
            n_tokens = min(LONGEST, 1 << (len(e.completion.token_ids).bit_length() - 1))
            wrong = stale(self._updates, claim, e) if claim.clause == "CACHE-001" else None
            groups.setdefault((n_tokens, wrong), []).append(e)
        return groups

    def _tolerance(self, exchanges: Sequence[Exchange], n_tokens: int) -> Tolerance:
        """What is allowed for completions of so many tokens or more, by the noise of what may serve them."""
        served = [self._history.served(e) for e in exchanges]
        versions = sorted({version for s in served for version in (*s.at_start, *s.later)})
        return self._recorded.tolerance({v: self._digests[v] for v in versions}, n_tokens)

    def _chosen(self, exchanges: Sequence[Exchange]) -> list[Exchange]:
        order = torch.randperm(len(exchanges), generator=self._generator)[: self._most]
        return [exchanges[index] for index in sorted(order.tolist())]

    def _measure(self, seed: int) -> Recorded:
        answered = [e for e in self._history.exchanges if e.completion.token_ids]
        prompts = [e.request.prompt_token_ids for e in answered]
        top = max((max(prompt) for prompt in prompts), default=0)
        if top >= self._oracle.vocab_size:
            raise HistoryError(
                f"a prompt has the token {top}, and the model knows {self._oracle.vocab_size} tokens: it "
                "isn't the model of this run"
            )
        longest = max((len(e.completion.token_ids) for e in answered), default=1)
        return Recorded(self._oracle, prompts, longest, seed)


@dataclass(frozen=True)
class _Fixed:
    """A tolerance that was measured for the completions at hand."""

    measured: Tolerance

    def tolerance(self, size: tuple[int, int]) -> Tolerance:
        return self.measured


def _weak(what: str, powers: dict[str, list[float]], count: int) -> str:
    told = [
        f"from {rival} on {sum(p >= POWER for p in found)} (the best is {max(found):.2g} tolerances away)"
        for rival, found in powers.items()
    ]
    apart = ", ".join(told) or "from nothing else, for there are no other weights"
    return (
        f"of {count} completions {what}, told apart {apart}; it takes {min(LEAST, count)} that are "
        f"{POWER:g} tolerances away from each"
    )


def _some(shown: Sequence[str]) -> str:
    if len(shown) <= 2:
        return " and ".join(shown)
    return f"{shown[0]}, ..., {shown[-1]} ({len(shown)} claims)"
