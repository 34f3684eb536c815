"""The baseline: clauses that are known to fail, each with a reason, and what that makes of an outcome.

A TOML file with a table for each clause: ``reason``, and ``run = false`` for one that isn't to be run at
all. An entry excuses a failure, never a lack of power or a defect of the kit, and it has to go when the
clause passes. Nothing here knows a rollout.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .outcome import Outcome
from .spec import clauses


class BaselineError(ValueError):
    """A baseline that can't be used. The message is one line."""


@dataclass(frozen=True)
class Expected:
    """Why a clause is known to fail; with ``run`` False it is left out."""

    reason: str
    run: bool = True


def read(path: str) -> dict[str, Expected]:
    """What a file says, by clause id; nothing where no file is named. Raises BaselineError."""
    if not path:
        return {}
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no such file, not UTF-8, not TOML
        raise BaselineError(f"the baseline {path!r} can't be read: {' '.join(str(error).split())}") from error
    known = [clause.id for clause in clauses()]
    for clause_id, entry in found.items():
        if clause_id not in known:
            raise BaselineError(
                f"the baseline {path!r} names the unknown clause {clause_id!r}; there are {', '.join(known)}"
            )
        if fault := _fault(entry):
            raise BaselineError(f"the baseline {path!r}: {fault.format(id=clause_id)}")
    return {clause_id: Expected(**entry) for clause_id, entry in found.items()}


def _fault(entry: Any) -> str:
    if not isinstance(entry, dict):
        return '{id} is not a table: write [{id}], and reason = "..." below it'
    if not isinstance(entry.get("reason"), str) or not entry["reason"].strip():
        return '[{id}] gives no reason: write reason = "..." below it'
    if not isinstance(entry.get("run", True), bool):
        return "[{id}] run is neither true nor false"
    if more := sorted(entry.keys() - {"reason", "run"}):
        return f"[{{id}}] has {more[0]}; allowed: reason, run"
    return ""


def weigh(expected: Expected, outcome: Outcome, message: str) -> tuple[Outcome, str]:
    """What an outcome and its message become for a clause that the baseline lists."""
    if outcome in (Outcome.FAIL, Outcome.BLOCKED):
        return Outcome.EXPECTED_FAIL, f"{message}\nexpected: {expected.reason}"
    if outcome == Outcome.PASS:
        told = f"it passes, so its entry in the baseline has to go ({expected.reason}): {message}"
        return Outcome.STALE_EXPECTED_FAIL, told
    return outcome, message
