"""report.json, junit.xml and report.md in one folder."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..coverage import lines
from ..runner import Report, versions

SCHEMA_VERSION = 1


def schema() -> dict[str, Any]:
    """The JSON schema that report.json follows."""
    text = files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def report_json(report: Report) -> dict[str, Any]:
    """The report as the schema has it."""
    settings = report.settings
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "rollout": report.rollout,
        "model": settings.model or "tiny-qwen2, made on the spot",
        "profile": settings.profile,
        "only": list(settings.only),
        "baseline": settings.baseline,
        "dtype": report.dtype,
        "device": report.device,
        "oracle_device": settings.oracle_device,
        "capabilities": report.capabilities,
        "details": report.details,
        "ok": report.ok,
        "troubles": report.troubles,
        "totals": {str(outcome): count for outcome, count in report.totals().items()},
        "results": [result.to_json() for result in report.results],
    }


def write(report: Report, folder: Path) -> None:
    """Write the three files into ``folder``, which is made if it isn't there."""
    folder.mkdir(parents=True, exist_ok=True)
    data = report_json(report)
    (folder / "report.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(_markdown(data), encoding="utf-8")
    ET.ElementTree(_junit(data)).write(folder / "junit.xml", encoding="utf-8", xml_declaration=True)


def _markdown(data: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in data["totals"].items() if count)
    only = ", ".join(data["only"])
    text = [
        f"# {'Conforms' if data['ok'] else 'Does not conform'}: `{data['rollout']}`",
        "",
        f"{counts}.",
        "",
        f"- Model: {data['model']}, {data['dtype']}, on {data['device']}",
        f"- Clauses: {f'{only} and what they require' if only else 'profile ' + data['profile']}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in data['versions'].items())}",
        f"- Declared: {', '.join(data['capabilities']) or 'nothing'}",
        *([f"- Baseline: {data['baseline']}"] if data["baseline"] else []),
        *(f"- {name}: {value}" for name, value in data["details"].items()),
        *(f"- {line}" for line in lines(data)),
        *(f"- **Trouble: {trouble}**" for trouble in data["troubles"]),
        "",
        "| clause | level | outcome | seconds | what was seen |",
        "|---|---|---|---:|---|",
    ]
    for result in data["results"]:
        told = " ".join(result["message"].split()).replace("|", "\\|")
        cells = (
            result["clause"],
            result["level"],
            result["outcome"],
            f"{result['seconds']:.1f}",
            told,
        )
        text.append(f"| {' | '.join(cells)} |")
    bad = [r for r in data["results"] if r["outcome"] in ("fail", "error", "expected-fail")]
    if bad:
        text += ["", "To see a failure again:", ""]
        text += [f"- {result['clause']}: `{result['reproduce']}`" for result in bad]
    return "\n".join(text) + "\n"


_JUNIT = {
    "fail": "failure",
    "stale-expected-fail": "failure",
    "error": "error",
    "blocked": "skipped",
    "not-applicable": "skipped",
    "expected-fail": "skipped",
    "disabled": "skipped",
}


def _junit(data: dict[str, Any]) -> ET.Element:
    tags = Counter(_JUNIT.get(result["outcome"]) for result in data["results"])
    suite = ET.Element(
        "testsuite",
        name="rollproof",
        tests=str(len(data["results"])),
        failures=str(tags["failure"]),
        errors=str(tags["error"]),
        skipped=str(tags["skipped"]),
        time=f"{sum(result['seconds'] for result in data['results']):.3f}",
    )
    for result in data["results"]:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"rollproof.{result['clause'].partition('-')[0]}",
            name=result["clause"],
            time=f"{result['seconds']:.3f}",
        )
        if tag := _JUNIT.get(result["outcome"]):
            note = ET.SubElement(case, tag, message=f"{result['outcome']}: {result['message']}")
            note.text = result["reproduce"]
    root = ET.Element("testsuites")
    root.append(suite)
    return root
