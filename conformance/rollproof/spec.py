"""The list of clauses: read from clauses.toml, each joined with its check."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from .protocol import Capability

if TYPE_CHECKING:
    from .session import Session

Check = Callable[["Session"], Awaitable[str]]


class UnknownClauseError(ValueError):
    """A clause id that the specification doesn't have. The message is one line."""


@dataclass(frozen=True)
class Clause:
    """One clause of the specification (fields: see the head of clauses.toml)."""

    id: str
    level: str
    title: str
    text: str
    how: str
    check: str
    needs: tuple[Capability, ...]
    requires: tuple[str, ...]
    bugs: tuple[str, ...]
    calls: tuple[int, int] = (0, 0)
    fresh: bool = False
    profile: str = "core"
    reason: str = ""

    @property
    def family(self) -> str:
        """What the id begins with."""
        return self.id.partition("-")[0]

    @property
    def terms(self) -> str:
        """Its level, and what it needs to be run."""
        terms = [self.level, *(["profile full"] if self.profile == "full" else [])]
        terms += ["a fresh rollout"] if self.fresh else []
        terms += [f"needs `{item}`" for item in self.needs]
        return "; ".join(terms + [f"requires {item}" for item in self.requires])

    @property
    def module(self) -> str:
        """The file under ``clauses/`` that holds the check."""
        return self.check.partition(":")[0]

    def function(self) -> Check:
        """The check itself: it returns a message for a pass, and raises for anything else."""
        name = self.check.partition(":")[2]
        check: Check = getattr(importlib.import_module(f"rollproof.clauses.{self.module}"), name)
        return check


def clauses() -> tuple[Clause, ...]:
    """Every clause that has a check, in the order they run."""
    return tuple(clause for clause in written() if clause.check)


@cache
def written() -> tuple[Clause, ...]:
    """Every clause of the specification, also those that have a reason in place of a check."""
    text = files(__package__).joinpath("clauses.toml").read_text(encoding="utf-8")
    return tuple(
        Clause(
            id=clause_id,
            needs=tuple(Capability(item) for item in fields.pop("needs")),
            requires=tuple(fields.pop("requires")),
            bugs=tuple(fields.pop("bugs")),
            calls=tuple(fields.pop("calls", (0, 0))),
            **fields,
        )
        for clause_id, fields in tomllib.loads(text).items()
    )


def select(ids: Sequence[str], profile: str = "full") -> tuple[Clause, ...]:
    """The named clauses, whatever their profile, and those they require, in the order they run.

    Where none is named: those of the profile; "full" has all. Raises UnknownClauseError.
    """
    known = {clause.id: clause for clause in clauses()}
    if mute := [clause for clause in written() if clause.id in ids and not clause.check]:
        raise UnknownClauseError(f"clause {mute[0].id} has no check: {mute[0].reason}")
    if unknown := [clause_id for clause_id in ids if clause_id not in known]:
        raise UnknownClauseError(f"unknown clause {unknown[0]!r}; there are {', '.join(known)}")
    of_profile = [clause.id for clause in known.values() if profile in ("full", clause.profile)]
    wanted, queue = set[str](), list(ids or of_profile)
    while queue:
        clause_id = queue.pop()
        if clause_id not in wanted:
            wanted.add(clause_id)
            queue.extend(known[clause_id].requires)
    return tuple(clause for clause in known.values() if clause.id in wanted)


def listing(chosen: Sequence[Clause]) -> str:
    """Every clause in a line, the chosen ones with a star."""
    lines = [
        f"{'*' if clause in chosen else ' '} {clause.id:<10} {clause.title} ({clause.terms.replace('`', '')})"
        for clause in clauses()
    ]
    return "\n".join([*lines, f"* would run: {len(chosen)} of {len(clauses())} clauses"])


def markdown() -> str:
    """SPEC.md, whose middle part is the clauses as this file has them."""
    families: dict[str, list[Clause]] = {}
    for clause in written():
        families.setdefault(clause.family, []).append(clause)
    lines = []
    for family, members in families.items():
        lines += [f"### {family}", ""]
        for clause in members:
            lines += [f"**{clause.id} {clause.title}** ({clause.terms})  ", clause.text, ""]
            how = f"- Check: {clause.how}" if clause.check else f"- Not checked: {clause.reason} {clause.how}"
            lines += [how, f"- Shipped as: {', '.join(clause.bugs)}", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
