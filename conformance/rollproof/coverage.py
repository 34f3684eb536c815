"""What a run covered, told last: from what its report says, and the list of clauses."""

from __future__ import annotations

from typing import Any

from .outcome import Outcome
from .spec import clauses

_JUDGED = (Outcome.PASS, Outcome.FAIL, Outcome.EXPECTED_FAIL, Outcome.STALE_EXPECTED_FAIL)


def lines(report: dict[str, Any]) -> list[str]:
    """In a few lines, from the content of report.json."""
    results = report["results"]
    judged = [result for result in results if _is_judged(result)]
    updates, completions = (sum(result[name] for result in results) for name in ("updates", "completions"))
    seeds = ", ".join(sorted({str(result["seed"]) for result in results}))
    return [
        f"{len(judged)} of the {len(clauses())} clauses of the specification judged, "
        f"by {updates} updates and {completions} completions",
        *(
            f"not applicable without {lacking}: {', '.join(ids)}"
            for lacking, ids in _inapplicable(report).items()
        ),
        f"{report['model']}, {report['dtype']}, seed {seeds}",
    ]


def _is_judged(result: dict[str, Any]) -> bool:
    """Whether it says anything of the rollout: an expected failure may have been blocked."""
    asked = result["updates"] or result["completions"] or result["outcome"] == Outcome.FAIL
    return bool(asked) and result["outcome"] in _JUDGED


def _inapplicable(report: dict[str, Any]) -> dict[str, list[str]]:
    """Clauses that weren't applicable, by what would make them so: their own needs, or those they require."""
    needs: dict[str, set[str]] = {}
    for clause in clauses():
        needs[clause.id] = set(map(str, clause.needs)).union(*(needs[other] for other in clause.requires))
    found: dict[str, list[str]] = {}
    for result in report["results"]:
        if result["outcome"] == Outcome.NOT_APPLICABLE:
            lacking = sorted(needs[result["clause"]].difference(report["capabilities"]))
            wanted = " and ".join(lacking) or f"more ({result['message']})"
            found.setdefault(wanted, []).append(result["clause"])
    return found
