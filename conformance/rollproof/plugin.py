"""The pytest door: ``pytest --pyargs rollproof.clauses --rollout pkg.mod:factory``.

Each clause is one test item, whatever the user's own pytest configuration collects. Loaded in every
pytest run where rollproof is installed, so nothing heavy is imported until a clause runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import baseline, options
from .factory import FactoryError, Target, load
from .outcome import Outcome, Result
from .settings import MADE, Settings, SettingsError
from .spec import Clause, UnknownClauseError, clauses, listing, select

if TYPE_CHECKING:
    from .runner import Report, Runner

_CLAUSES = Path(__file__).parent / "clauses"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options where the command line asks for clauses."""
    _add_options(parser, sys.argv)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Add them where pytest was called otherwise: by ``pytest.main``, or by xdist in a worker."""
    _add_options(parser, args)


_with_options = weakref.WeakSet[pytest.Parser]()


def _add_options(parser: pytest.Parser, args: Sequence[str]) -> None:
    # They have everyday names, which a project's own conftest may want in all its other runs.
    asked = any("rollproof.clauses" in arg or arg.startswith("--rollout") for arg in args)
    if not asked or parser in _with_options:
        return
    _with_options.add(parser)
    options.add(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Print the clauses where that is all that is asked for; nothing is collected or started."""
    if not config.getoption("list", False):
        return None
    try:
        settings = options.settings(config)
        expected = baseline.read(settings.baseline)
        disabled = {clause_id for clause_id, entry in expected.items() if not entry.run}
        chosen = select(settings.only, settings.profile)
        print(listing([clause for clause in chosen if clause.id not in disabled]))
    except (baseline.BaselineError, SettingsError, UnknownClauseError) as error:
        raise pytest.UsageError(str(error)) from None
    return 0


def pytest_configure(config: pytest.Config) -> None:
    """Check the options and import the rollout's factory before anything starts."""
    if not config.getoption("rollout", None):
        return
    try:
        settings = options.settings(config)
        baseline.read(settings.baseline)
        chosen = select(settings.only, settings.profile)
        target = load(config.getoption("rollout"))
    except (baseline.BaselineError, FactoryError, SettingsError, UnknownClauseError) as error:
        raise pytest.UsageError(str(error)) from None
    # What an engine leaves to the garbage collector is not judged, even where warnings are errors.
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
    config.pluginmanager.register(Judging(config, target, settings, chosen), "rollproof-judging")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ClauseFile | None:
    """Collect the clause files of this package, and no others."""
    if file_path.parent == _CLAUSES and any(clause.module == file_path.stem for clause in clauses()):
        file: ClauseFile = ClauseFile.from_parent(parent, path=file_path)
        return file
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse clauses without a rollout; run the chosen ones in the order of the specification."""
    found = {item.clause.id: item for item in items if isinstance(item, ClauseItem)}
    if not found:
        return
    judging = config.pluginmanager.get_plugin("rollproof-judging")
    if judging is None:
        raise pytest.UsageError("no rollout to judge: name one with --rollout pkg.mod:factory")
    chosen = [found[clause.id] for clause in judging.chosen if clause.id in found]
    dropped = [item for item in found.values() if item not in chosen]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [*chosen, *(item for item in items if not isinstance(item, ClauseItem))]


class ClauseFile(pytest.File):
    """One clause family."""

    def collect(self) -> Iterator[ClauseItem]:
        """Its clauses."""
        for clause in clauses():
            if clause.module == self.path.stem:
                yield ClauseItem.from_parent(self, name=clause.id, clause=clause)


class ClauseItem(pytest.Item):
    """One clause as a test."""

    def __init__(self, *, clause: Clause, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clause = clause
        self.user_properties.append(("clause", clause.id))

    def runtest(self) -> None:
        """Judge, and pass, skip, fail as expected or fail by the outcome."""
        judging = self.config.pluginmanager.get_plugin("rollproof-judging")
        assert isinstance(judging, Judging)  # the collection was refused otherwise
        # An engine's warnings are not what this run is about, even where they are made errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = judging.run(self.clause)
        # As text, which is what xdist's workers can send and JUnit can hold.
        found = {"result": result.to_json(), "facts": judging.facts()}
        self.user_properties.append(("rollproof", json.dumps(found)))
        if result.outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.STALE_EXPECTED_FAIL):
            raise ClauseFailedError(result)
        if result.outcome == Outcome.EXPECTED_FAIL:
            pytest.xfail(f"{result.outcome}: {result.message}")  # does nothing with --runxfail
        if result.outcome != Outcome.PASS:
            pytest.skip(f"{result.outcome}: {result.message}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message alone: a traceback of the kit says nothing about the rollout."""
        if isinstance(excinfo.value, ClauseFailedError):
            result, clause = excinfo.value.result, self.clause
            head = f"{clause.id} {clause.title} ({result.outcome}): {result.message}"
            return f"{head}\n\nclause: {clause.text}\nreproduce: {result.reproduce}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the clause is, and what it is called."""
        return self.path, None, f"{self.clause.id} {self.clause.title}"


class ClauseFailedError(Exception):
    """A clause that failed, could not be judged, or passed against the baseline."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.message)
        self.result = result


class Judging:
    """The run: one event loop and one Runner in each process that runs clauses, one report in all."""

    def __init__(
        self, config: pytest.Config, target: Target, settings: Settings, chosen: tuple[Clause, ...]
    ) -> None:
        self.chosen = chosen
        self._config = config
        self._target = target
        self._settings = settings
        self._loop: asyncio.Runner | None = None
        self._runner: Runner | None = None
        self._results: list[Result] = []
        self._troubles: list[str] = []
        self._facts: dict[str, Any] = {}

    def run(self, clause: Clause) -> Result:
        """Judge one clause in this process."""
        from .runner import Runner

        if self._runner is None or self._loop is None:
            self._loop = asyncio.Runner()
            self._runner = Runner(self._target, self._settings, self._folder())
        return self._loop.run(self._runner.run(clause))

    def facts(self) -> dict[str, Any]:
        """What only the judging process knows of the rollout."""
        report = self._runner.report if self._runner is not None else None
        return {name: getattr(report, name) for name in ("dtype", "device", "capabilities", "details")}

    def pytest_report_header(self) -> list[str]:
        """Say what is judged, and what that will cost."""
        from .cost import told

        disabled = {id_ for id_, entry in baseline.read(self._settings.baseline).items() if not entry.run}
        run = [clause for clause in self.chosen if clause.id not in disabled]
        model = self._settings.model or MADE[0]
        model += ", made on the spot" if model in MADE else ""
        judging = f"judging {self._target.text} with {model}, seed {self._settings.seed}"
        return [f"rollproof: {judging}", f"rollproof: {told(self._settings, run)}"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather results, also those that xdist's workers send, and clauses that came to none."""
        names = {name for name, _ in report.user_properties}
        if report.failed and "clause" in names and "rollproof" not in names:
            self._troubles.append(f"{report.nodeid} came to no result in its {report.when}")
        for name, value in report.user_properties:
            if report.when == "call" and name == "rollproof":
                found = json.loads(str(value))
                self._facts, result = found["facts"], found["result"]
                self._results.append(Result(**result | {"outcome": Outcome(result["outcome"])}))
        if report.failed and "clause" in names:
            self._tell(report)

    def _tell(self, report: pytest.TestReport) -> None:
        # At once: a run may be long, and may be cut off before pytest tells its failures at the end.
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:  # there is none in xdist's workers, and theirs are told by the controller
            terminal.ensure_newline()
            terminal.write_line(report.longreprtext.split("\n\nclause: ")[0], red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the rollout, write the report, and leave no empty run green."""
        self._finish()
        if hasattr(self._config, "workerinput"):
            return
        if self._results and self._config.getoption("report"):
            from .report import write

            write(self._report(), self._config.getoption("report"))
        if not self._ok() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was covered and how it came out."""
        if not self._results:
            terminalreporter.write_line("rollproof: no clause was run, so nothing is shown")
            return
        from .coverage import lines
        from .report import report_json

        report = self._report()
        for line in lines(report_json(report)):
            terminalreporter.write_line(f"rollproof: {line}")
        counts = ", ".join(f"{count} {name}" for name, count in report.totals().items() if count)
        verdict = "conforms" if report.ok else "does not conform"
        for trouble in report.troubles:
            terminalreporter.write_line(f"rollproof: {trouble}", red=True)
        terminalreporter.write_line(f"rollproof: {self._target.text} {verdict} ({counts})")
        if folder := self._config.getoption("report"):
            terminalreporter.write_line(f"rollproof: report in {folder}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what went wrong in one of xdist's workers."""
        self._troubles += getattr(node, "workeroutput", {}).get("rollproof_troubles", [])

    def _finish(self) -> None:
        if self._loop is None or self._runner is None:
            return
        try:
            self._loop.run(self._runner.close())
        finally:
            self._loop.close()
        self._troubles += self._runner.report.troubles
        if output := getattr(self._config, "workeroutput", None):
            output["rollproof_troubles"] = self._troubles

    def _ok(self) -> bool:
        return bool(self._results) and self._report().ok

    def _folder(self) -> Path | None:
        folder: Path | None = self._config.getoption("report")
        if folder is None:
            return None
        if worker := getattr(self._config, "workerinput", None):
            folder = folder / worker["workerid"]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _report(self) -> Report:
        from .runner import Report

        return Report(
            self._target.text,
            self._settings,
            self._facts["dtype"],
            self._facts["device"],
            self._facts["capabilities"],
            self._facts["details"],
            self._results,
            self._troubles,
        )
