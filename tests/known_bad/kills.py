"""The kill matrix: which known-bad rollout fails which clause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollproof import Outcome, Report
from rollproof.spec import clauses

_SIGNS = {Outcome.FAIL: "**X**", Outcome.BLOCKED: "-", Outcome.PASS: "", Outcome.NOT_APPLICABLE: ""}


def markdown(reports: Mapping[str, Report], docs: Mapping[str, str], versions: Sequence[str]) -> str:
    """A table of rollouts by clauses, and what each rollout does wrong, in its docstring's words."""
    ids = [clause.id for clause in clauses()]
    lines = [
        "# What each known-bad rollout fails",
        "",
        "Written by `nox -s known_bad`. Each rollout is the reference on a real engine with one thing done",
        f"as somebody shipped it ({', '.join(versions)}). **X** fails, - is blocked by a clause that failed,",
        "and an empty cell passed or is not applicable.",
        "",
        f"| rollout | {' | '.join(ids)} |",
        f"|---|{':-:|' * len(ids)}",
    ]
    for name, report in reports.items():
        found = {result.clause: result.outcome for result in report.results}
        cells = [_SIGNS.get(found[clause_id], str(found[clause_id])) for clause_id in ids]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| rollout | its fault |", "|---|---|"]
    lines += [f"| {name} | {docs[name]} |" for name in reports]
    return "\n".join(lines) + "\n"
