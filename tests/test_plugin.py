"""The pytest door and the report, from a folder of the user's own, with the rollout's model as rollout."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest

from rollproof.report import schema
from rollproof.spec import clauses

CLAUSES = ("--pyargs", "rollproof.clauses", "-p", "no:cacheprovider")
if "rollproof" not in {point.name for point in entry_points(group="pytest11")}:
    CLAUSES = (*CLAUSES, "-p", "rollproof.plugin")  # not installed, only on the path


def run(folder: Path, *args: str, clauses: bool = True) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    env["OMP_NUM_THREADS"] = "1"  # xdist's workers would fight for the cores
    command = [sys.executable, "-m", "pytest", *(CLAUSES if clauses else CLAUSES[2:]), *args]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def error_lines(found: subprocess.CompletedProcess[str]) -> list[str]:
    assert found.returncode != 0
    return [line for line in found.stderr.splitlines() if line.startswith("ERROR:")]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run that fails, judged where warnings are errors and nothing is called test_*.py."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\npython_files = check_*.py\n"
        "asyncio_default_fixture_loop_scope = function\n"  # or pytest-asyncio's own warning is an error
    )
    found = run(folder, "--rollout", "toy:make,fault=forgets", "--report", "out", "--seed", "3")
    return found, folder / "out"


def test_a_failing_rollout_fails_the_run_and_says_why(judged):
    found, _ = judged
    assert found.returncode == 1, found.stdout
    assert "rollproof: toy:make,fault=forgets does not conform" in found.stdout
    failure = "SYNC-003 right version (fail): completion 1 of 8: expected version"
    at_once, _, at_the_end = found.stdout.partition("= FAILURES =")
    assert at_once.count(failure) == 1
    assert at_the_end.count(failure) >= 1
    assert "Traceback" not in found.stdout


def test_the_report_follows_its_schema(judged):
    _, out = judged
    report = json.loads((out / "report.json").read_text())
    jsonschema.validate(report, schema())
    assert report["rollout"] == "toy:make,fault=forgets"
    assert report["ok"] is False
    assert (report["profile"], report["only"]) == ("core", [])
    assert report["totals"]["fail"] == 1
    assert [r["clause"] for r in report["results"]][:3] == ["SYNC-001", "SYNC-002", "SYNC-003"]
    assert {r["clause"] for r in report["results"] if r["outcome"] == "blocked"} >= {"RANK-001", "LIFE-002"}
    assert sum(report["totals"].values()) == len(report["results"])
    assert all(result["seed"] == 3 for result in report["results"])


def test_junit_and_markdown_say_what_the_report_says(judged):
    _, out = judged
    report = json.loads((out / "report.json").read_text())
    suite = ET.parse(out / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    assert suite.get("tests") == str(len(report["results"]))
    assert suite.get("failures") == "1"
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["SYNC-003"]
    text = (out / "report.md").read_text()
    assert text.startswith("# Does not conform: `toy:make,fault=forgets`")
    for result in report["results"]:
        assert f"| {result['clause']} | {result['level']} | {result['outcome']} |" in text


def test_the_history_holds_every_call(judged):
    _, out = judged
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert lines[0]["event"] == "rollout started"
    asked = [line for line in lines if line["event"] == "request started"]
    answered = {line["started"] for line in lines if line["event"] == "request ended"}
    assert {line["tick"] for line in asked} == answered


def test_the_reproduce_line_fails_the_same_way_when_pasted(judged, tmp_path: Path):
    _, out = judged
    report = json.loads((out / "report.json").read_text())
    bad = next(result for result in report["results"] if result["outcome"] == "fail")
    command = shlex.split(bad["reproduce"])
    assert command[:3] == ["pytest", "--pyargs", "rollproof.clauses"]
    again = run(tmp_path, *command[3:])
    assert again.returncode == 1
    # Fewer clauses run before it, so the versions have other numbers.
    assert re.sub(r"version \d+.*", "", bad["message"]) in again.stdout
    assert f"{bad['clause']} right version (fail)" in again.stdout


def test_a_right_rollout_is_green_also_under_xdist(tmp_path: Path):
    found = run(
        tmp_path, "--rollout", "toy:make", "--report", "out", "-n", "2", "--only", "BASE-001,SYNC-001"
    )
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    jsonschema.validate(report, schema())
    assert report["ok"]
    assert report["only"] == ["BASE-001", "SYNC-001"]
    cost = "rollproof: clauses: 3; starts of the rollout: 1 (more where one breaks it); updates: about 2; "
    assert f"{cost}requests: about 24; oracle: up to " in found.stdout
    assert f"rollproof: 3 of the {len(clauses())} clauses of the specification judged, by 2 updates and " in (
        found.stdout
    )
    assert {r["clause"] for r in report["results"]} == {"SYNC-001", "SYNC-002", "BASE-001"}


def test_the_list_has_every_clause_and_marks_those_that_would_run(tmp_path: Path):
    found = run(tmp_path, "--list", "--only", "LIFE-003")
    assert (found.returncode, found.stderr) == (0, "")
    *lines, total = found.stdout.splitlines()
    assert [line[2:].split()[0] for line in lines] == [clause.id for clause in clauses()]
    marked = {line[2:].split()[0] for line in lines if line.startswith("* ")}
    assert marked == {"SYNC-002", "SYNC-003", "RANK-001", "NUM-004", "LIFE-003"}
    rare = next(line for line in lines if "LIFE-003" in line)
    assert "(MUST; profile full; needs processes; requires RANK-001; requires NUM-004)" in rare
    assert total == f"* would run: 5 of {len(clauses())} clauses"
    assert "* LIFE-003" not in run(tmp_path, "--list").stdout
    assert "* LIFE-003" in run(tmp_path, "--list", "--profile", "full").stdout
    assert "unknown clause 'SYNC-9'" in error_lines(run(tmp_path, "--list", "--only", "SYNC-9"))[0]


def test_a_baseline_makes_a_known_failure_green_and_says_why(tmp_path: Path):
    (tmp_path / "known.toml").write_text(
        '[SYNC-003]\nreason = "it forgets"\n[BASE-002]\nreason = "too slow"\nrun = false\n'
    )
    args = ("--rollout", "toy:make,fault=forgets", "--baseline", "known.toml", "--only", "SYNC-003,BASE-002")
    found = run(tmp_path, *args, "--report", "out", "-rxs")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 passed, 1 skipped" in found.stdout
    assert "1 xfailed" in found.stdout
    assert "conforms (2 pass, 1 expected-fail, 1 disabled)" in found.stdout
    report = json.loads((tmp_path / "out/report.json").read_text())
    jsonschema.validate(report, schema())
    assert (report["ok"], report["baseline"]) == (True, "known.toml")
    known = next(result for result in report["results"] if result["clause"] == "SYNC-003")
    assert "these logprobs are those of version" in known["message"]
    assert known["message"].endswith("expected: it forgets")
    assert "baseline" not in known["reproduce"]
    suite = ET.parse(tmp_path / "out/junit.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "2")
    assert f"- SYNC-003: `{known['reproduce']}`" in (tmp_path / "out/report.md").read_text()


def test_a_stale_baseline_fails_the_run(tmp_path: Path):
    (tmp_path / "known.toml").write_text('[SYNC-002]\nreason = "it was broken"\n')
    found = run(tmp_path, "--rollout", "toy:make", "--baseline", "known.toml", "--only", "SYNC-002")
    assert found.returncode == 1
    assert (
        "SYNC-002 applied (stale-expected-fail): it passes, so its entry in the baseline has to go "
        "(it was broken): " in found.stdout
    )
    assert "--seed 0 --baseline known.toml --only SYNC-002" in found.stdout


def test_no_rollout_is_one_plain_line(tmp_path: Path):
    assert error_lines(run(tmp_path)) == [
        "ERROR: no rollout to judge: name one with --rollout pkg.mod:factory"
    ]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["--rollout", "toy"],
            "ERROR: --rollout 'toy' names no factory: write it as --rollout pkg.mod:factory",
        ),
        (["--rollout", "nowhere:make"], "can't be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (["--rollout", "toy:nothing"], "can't be imported: AttributeError"),
        (["--rollout", "toy:Toy.capabilities"], "is a frozenset, not callable"),
        (["--rollout", "toy:make,fault"], "'fault' is not key=value"),
        (["--rollout", "toy:make", "--only", "SYNC-9"], "ERROR: unknown clause 'SYNC-9'; there are SYNC-001"),
        (
            ["--rollout", "toy:make", "--model", "nowhere"],
            "ERROR: no model at 'nowhere': it has to be a Hugging",
        ),
        (
            ["--rollout", "toy:make", "--baseline", "no.toml"],
            "ERROR: the baseline 'no.toml' can't be read: [Errno 2]",
        ),
        (["--rollout", "toy:make", "--profile", "all"], "ERROR: profile is 'all'; allowed: core, full"),
        (["--rollout", "toy:make", "--dtype", "int8"], "ERROR: dtype is 'int8'; allowed: float32, bfloat16"),
    ],
)
def test_bad_options_are_one_plain_line(tmp_path: Path, args: list[str], line: str):
    (told,) = error_lines(run(tmp_path, *args))
    assert line in told


def test_a_run_of_nothing_is_not_green(tmp_path: Path):
    found = run(tmp_path, "--rollout", "toy:make", "-k", "no_such_clause")
    assert found.returncode != 0
    assert "rollproof: no clause was run" in found.stdout


def test_a_run_without_clauses_is_not_green_for_a_rollout(tmp_path: Path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass")
    found = run(tmp_path, "test_own.py", "--rollout", "toy:make", clauses=False)
    assert found.returncode == 1
    assert "rollproof: no clause was run" in found.stdout


def test_other_runs_keep_their_own_options(tmp_path: Path):
    options = ["--model", "--seed", "--only", "--report", "--dtype"]
    lines = "".join(f"    parser.addoption({option!r})\n" for option in options)
    (tmp_path / "conftest.py").write_text(f"def pytest_addoption(parser):\n{lines}")
    (tmp_path / "test_own.py").write_text(
        "def test_own(pytestconfig): assert pytestconfig.getoption('model') == 'mine'"
    )
    found = run(tmp_path, "test_own.py", "--model", "mine", clauses=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_kit_needs_no_engine_and_the_plugin_no_torch():
    code = (
        "import sys; sys.modules['vllm'] = None; import rollproof.plugin; assert 'torch' not in sys.modules; "
        "import rollproof.runner, rollproof.clauses.cache, rollproof.report; "
        "from rollproof import check_rollout"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)


def test_the_committed_reports_follow_the_schema():
    folder = Path(__file__).parents[1] / "benchmarks/results/conformance"
    reports = [json.loads(path.read_text()) for path in folder.glob("*/report.json")]
    assert reports
    for report in reports:
        jsonschema.validate(report, schema())
        assert report["ok"]
