"""The command line: ``rollproof judge`` judges a recorded run, with no engine.

Only what was asked for is put together here; the judging itself is in ``afterwards``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .history import History, Update
from .outcome import Outcome
from .protocol import IN_FLIGHT, Adapter, Capability
from .reading import HistoryError, read
from .settings import DTYPES, Settings, SettingsError

if TYPE_CHECKING:
    from .runner import Report

_ABOUT = """\
Judge a recorded run: were its completions sampled with the adapter that had been sent?

HISTORY is what rollproof.record.Recorder wrote, and --adapters the folder it kept the adapters in. The
merged-weight model scores the recorded tokens; no engine is started. Exit code 0: something was shown and
nothing failed; 1: it does not conform, or too little could be told apart; 2: bad input."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. Ends the process with 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="rollproof", description="Proof of what an RL rollout samples with."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    judge = commands.add_parser(
        "judge",
        help="judge a recorded run, without an engine",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    judge.add_argument("history", type=Path, metavar="HISTORY", help="history.jsonl of the run")
    judge.add_argument("--model", required=True, metavar="DIR", help="the base model, a Hugging Face folder")
    judge.add_argument("--adapters", required=True, type=Path, metavar="DIR", help="the adapters of the run")
    judge.add_argument("--dtype", choices=DTYPES, help="what the engine computed with (default: as recorded)")
    judge.add_argument(
        "--in-flight",
        choices=[str(item) for item in IN_FLIGHT],
        help="what becomes of a request that an update overtakes (default: as recorded)",
    )
    judge.add_argument("--oracle-device", default="cpu", help="torch device for the model (default: cpu)")
    judge.add_argument(
        "--most",
        type=int,
        default=32,
        metavar="N",
        help="completions judged of each claim and version, chosen by the seed (default: 32)",
    )
    judge.add_argument("--seed", type=int, default=0, help="chooses completions and prompts (default: 0)")
    judge.add_argument("--life", type=int, metavar="N", help="which rollout, where the file holds several")
    judge.add_argument("--report", type=Path, metavar="DIR", help="write report.json, .md, junit.xml here")
    given = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries: not what this is about
            report = _judged(given)
    except (HistoryError, SettingsError) as error:
        judge.error(" ".join(str(error).split()))
    _tell(report)
    if given.report:
        from .report import write

        write(report, given.report)
        print(f"report in {given.report}")
    return 0 if report.ok else 1


def _judged(given: argparse.Namespace) -> Report:
    history = _one(read(given.history), given)
    if given.most < 1:
        raise SettingsError(f"--most is {given.most}; it has to be at least 1")
    settings = Settings(
        model=given.model,
        dtype=given.dtype or history.dtype,
        seed=given.seed,
        oracle_device=given.oracle_device,
    )
    if not given.adapters.is_dir():
        raise HistoryError(f"no folder of adapters at {given.adapters}: give the one the recorder wrote")
    import torch

    from .afterwards import judge_history
    from .oracle import ModelError, Oracle
    from .runner import Report

    try:
        oracle = Oracle(given.model, getattr(torch, settings.dtype), given.oracle_device)
    except ModelError as error:
        raise SettingsError(str(error)) from None
    in_flight = history.in_flight if given.in_flight is None else Capability(given.in_flight)
    results = judge_history(
        history,
        oracle,
        lambda update: load(given.adapters, update),
        in_flight=in_flight,
        seed=given.seed,
        most=given.most,
        reproduce=_command(given),
    )
    declared = [] if in_flight is None else [str(in_flight)]
    return Report(str(given.history), settings, settings.dtype, capabilities=declared, results=results)


def load(folder: Path, update: Update) -> Adapter:
    """The adapter of an update, as the recorder kept it. Raises HistoryError where it isn't that one."""
    told = f"the adapter of version {update.version}"
    places = [folder / f"{update.version}-{update.digest[:16]}", folder / str(update.version)]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise HistoryError(f"{told} is missing: there is no folder {places[1]}")
    try:
        adapter = Adapter.load(place, update.version)
    except (OSError, ValueError) as error:
        raise HistoryError(f"{told} can't be read: {error}") from None
    if adapter.digest() != update.digest:
        raise HistoryError(
            f"{told} in {place} is another one than was sent: its digest isn't the recorded one"
        )
    return adapter


def _one(histories: list[History], given: argparse.Namespace) -> History:
    count = len(histories)
    if given.life is None and count == 1:
        return histories[0]
    life: int | None = given.life
    if life is None or not 1 <= life <= count:
        raise HistoryError(
            f"{given.history} holds the lives of {count} rollouts; choose one: --life 1 to {count}"
        )
    return histories[life - 1]


def _command(given: argparse.Namespace) -> str:
    import shlex

    words = ["rollproof", "judge", str(given.history)]
    for name, value in vars(given).items():
        if name not in ("command", "history", "report") and value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _tell(report: Report) -> None:
    for result in report.results:
        print(f"{result.clause:<10} {result.outcome:<14} {result.message}")
        for item in result.witness:
            token = "all tokens" if item["token"] is None else f"token {item['token']}"
            print(f"{'':<25} witness: {token} of request {item['started']}, which ended at {item['ended']}")
    counts = ", ".join(f"{count} {name}" for name, count in report.totals().items() if count)
    print(f"{report.rollout} {'conforms' if report.ok else 'does not conform'} ({counts})")
    if not report.outcomes(Outcome.PASS, Outcome.FAIL):
        print("nothing could be shown either way", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
