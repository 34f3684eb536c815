"""How a clause can come out, and what a check raises to say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
    of its engine that may be why the clause failed."""

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

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return asdict(self)


class FailureError(Exception):
    """The rollout breaks the clause. ``fatal`` when it can't be used any further."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


@contextmanager
def about(what: str) -> Iterator[None]:
    """Put ``what`` before the message of a failure."""
    try:
        yield
    except FailureError as failure:
        raise FailureError(f"{what}: {failure}", fatal=failure.fatal) from failure


class RaisedError(FailureError):
    """A call of the rollout raised. Where the protocol asks it to raise, that is no failure."""


class NotApplicableError(Exception):
    """The clause says nothing about this rollout."""


class UnderpoweredError(Exception):
    """The oracle can't tell the candidates apart on these tokens, so nothing is claimed."""
