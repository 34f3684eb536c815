"""Known faults of engines (upstream.toml), found by a rollout's word on its engine and how a clause failed.

A failure stays a failure: this only says where it may come from. Nothing here knows an engine.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Fault:
    """One fault (fields: see the head of upstream.toml)."""

    engine: str
    versions: str
    clauses: tuple[str, ...]
    text: str
    device: str = ""
    says: tuple[str, ...] = ("",)
    reference: str = ""

    def fits(self, engine: str, device: str, clause_id: str, failure: str) -> bool:
        """Whether it may be why a clause failed; ``engine`` is a name and a version, as "vLLM 0.32.0"."""
        name, _, version = engine.rpartition(" ")
        try:
            # A development build has the faults of the release it leads to.
            affected = SpecifierSet(self.versions).contains(Version(Version(version).base_version))
        except InvalidVersion:
            return False
        here = not self.device or device.lower().startswith(self.device)
        said = any(part in failure for part in self.says)
        return name == self.engine and affected and here and clause_id in self.clauses and said

    def told(self) -> str:
        """In a sentence."""
        return f"{self.text} ({self.reference})" if self.reference else self.text


@cache
def faults() -> tuple[Fault, ...]:
    """All that are known."""
    text = files(__package__).joinpath("upstream.toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["fault"]
    lists = ("clauses", "says")
    return tuple(
        Fault(**item | {name: tuple(item[name]) for name in lists if name in item}) for item in found
    )


def known(engine: str, device: str, clause_id: str, failure: str) -> str:
    """The faults that may be why a clause failed; empty where none is known."""
    return "; ".join(f.told() for f in faults() if f.fits(engine, device, clause_id, failure))
