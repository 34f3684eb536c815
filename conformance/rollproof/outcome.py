"""How a clause can come out, and what a check raises to say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """The outcome of one clause. A run is green with a pass, and without any of ``RED``."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    """The kit itself could not judge: a defect of its own, or not enough statistical power."""
    BLOCKED = "blocked"
    """A clause that this one requires did not pass."""
    NOT_APPLICABLE = "not-applicable"
    EXPECTED_FAIL = "expected-fail"
    """It failed or was blocked, and the baseline says why."""
    STALE_EXPECTED_FAIL = "stale-expected-fail"
    """The baseline lists it, and it passed."""
    DISABLED = "disabled"
    """The baseline says not to run it."""


RED = frozenset({Outcome.FAIL, Outcome.ERROR, Outcome.BLOCKED, Outcome.STALE_EXPECTED_FAIL})
"""No run with one of these conforms."""

UNSHOWN = frozenset({Outcome.FAIL, Outcome.ERROR, Outcome.BLOCKED, Outcome.EXPECTED_FAIL, Outcome.DISABLED})
"""Where a clause came out as one of these, those that require it are blocked."""


@dataclass(frozen=True)
class Result:
    """One clause's outcome. ``reproduce`` is a command line; ``seconds`` is wall-clock time; ``updates``
    and ``completions`` are how many the rollout was asked for and answered; ``upstream`` is a known fault
    of its engine that may be why the clause failed. ``witness`` is the least that shows a failure, each
    completion as a ``Witness`` in plain JSON values."""

    clause: str
    level: str
    outcome: Outcome
    message: str
    seconds: float
    seed: int
    reproduce: str
    updates: int = 0
    completions: int = 0
    upstream: str = ""
    witness: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Witness:
    """A completion that shows a failure, and the first token by which it does, counted from 0.

    ``life`` says which rollout of history.jsonl it is from, counted from 1; ``started`` and ``ended``
    are its places there (their ``tick``). ``token`` is None where it takes all of its tokens.
    """

    life: int
    started: int
    ended: int
    token: int | None


class FailureError(Exception):
    """The rollout breaks the clause. ``fatal`` when it can't be used any further.

    ``witness`` is the fewest completions that show it; empty where it was no completion that did.
    """

    def __init__(self, message: str, *, fatal: bool = False, witness: Sequence[Witness] = ()) -> None:
        super().__init__(message)
        self.fatal = fatal
        self.witness = tuple(witness)


@contextmanager
def about(what: str) -> Iterator[None]:
    """Put ``what`` before the message of a failure."""
    try:
        yield
    except FailureError as failure:
        raise FailureError(f"{what}: {failure}", fatal=failure.fatal, witness=failure.witness) from failure


class RaisedError(FailureError):
    """A call of the rollout raised. Where the protocol asks it to raise, that is no failure."""


class NotApplicableError(Exception):
    """The clause says nothing about this rollout."""


class UnderpoweredError(Exception):
    """The oracle can't tell the candidates apart on these tokens, so nothing is claimed."""
