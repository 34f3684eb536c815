"""The kill matrix: which known-bad rollout fails which clause, gathered from every pytest process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollproof import Outcome, Report
from rollproof.runner import device, versions
from rollproof.spec import clauses


def told(report: Report) -> str:
    """What the matrix needs of a report, as text, which is what xdist's workers can send."""
    return json.dumps(
        {outcome: sorted(report.outcomes(outcome)) for outcome in (Outcome.FAIL, Outcome.BLOCKED)}
    )


class Kills:
    """A pytest plugin that writes the matrix to a file once all tests ended."""

    def __init__(self, file: str, faults: Mapping[str, str]) -> None:
        self._file = file
        self._faults = faults
        self._found: dict[str, dict[str, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test recorded, here or in a worker."""
        properties = dict(report.user_properties)
        if report.when == "call" and "kills" in properties:
            self._found[str(properties["rollout"])] = json.loads(str(properties["kills"]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write and print it, in the order of the list of cases."""
        kept = versions()
        engine = [f"vLLM {kept['vllm']}", f"torch {kept['torch']}", device().partition(" ")[0]]
        found = {name: self._found[name] for name in self._faults if name in self._found}
        text = markdown(found, self._faults, engine)
        Path(self._file).write_text(text, encoding="utf-8")
        terminalreporter.write(text)


def markdown(
    found: Mapping[str, Mapping[str, Sequence[str]]], faults: Mapping[str, str], engine: Sequence[str]
) -> str:
    """A row for each rollout, and one for each clause with the rollouts that fail it."""
    lines = [
        "# What each known-bad rollout fails",
        "",
        "Written by `nox -s known_bad`. Each rollout is the reference on a real engine with one thing done",
        f"as somebody shipped it ({', '.join(engine)}). What it fails is what it is declared to fail;",
        "blocked are the clauses that can claim nothing where those fail; the others passed or are not",
        "applicable.",
        "",
        "| rollout | its fault | fails | blocked |",
        "|---|---|---|--:|",
    ]
    for name, outcomes in found.items():
        fails = ", ".join(outcomes[Outcome.FAIL])
        lines.append(f"| {name} | {faults[name]} | {fails} | {len(outcomes[Outcome.BLOCKED])} |")
    lines += ["", "| clause | failed by |", "|---|---|"]
    for clause in clauses():
        victims = [name for name, outcomes in found.items() if clause.id in outcomes[Outcome.FAIL]]
        lines.append(f"| {clause.id} {clause.title} | {', '.join(victims)} |")
    return "\n".join(lines) + "\n"
