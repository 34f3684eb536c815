"""How often the kit fails a rollout that is right: the reference and every odd-but-right one, over seeds.

``python tests/false_alarms.py --runs 100 --out FILE``. The model and its engine are the same in all
runs; prompts, adapters and the calibration are drawn anew from each seed. The file is written after
every seed, so a run that is cut short leaves what it found.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import rollproof.verify
from known_bad import ODD_BUT_RIGHT, REFERENCE, started
from rollproof import Outcome, Report, Settings, check_rollout
from rollproof.bench import Bench
from rollproof.judge import judge
from rollproof.models import make_model
from rollproof.protocol import RolloutSpec
from rollproof.runner import device, versions
from rollproof_reference import make

CASES = (REFERENCE, *ODD_BUT_RIGHT)


@dataclass
class Tally:
    """What came of one rollout's runs."""

    runs: int = 0
    judged: int = 0
    largest: float = 0.0
    alarms: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, seed: int, report: Report, largest: float) -> None:
        """Count a run. What is blocked follows from an alarm, and what isn't applicable is no verdict."""
        self.runs += 1
        self.largest = max(self.largest, largest)
        for result in report.results:
            told = f"seed {seed}, {result.clause}: {result.message.partition(chr(10))[0]}"
            self.judged += result.outcome in (Outcome.PASS, Outcome.FAIL)
            self.alarms += [told] if result.outcome == Outcome.FAIL else []
            self.errors += [told] if result.outcome == Outcome.ERROR else []
        self.errors += [f"seed {seed}: {trouble}" for trouble in report.troubles]


@contextmanager
def distances() -> Iterator[list[float]]:
    """How far each claim's worst completion was from the right version, in parts of what is allowed."""
    found: list[float] = []

    def watched(scored: Any, tolerance: Any) -> Any:
        verdict = judge(scored, tolerance)
        found.append(verdict.distance / tolerance.completion)
        return verdict

    with patch.object(rollproof.verify, "judge", watched):
        yield found


def markdown(tallies: dict[str, Tally], seeds: Sequence[int]) -> str:
    """The counts, and every alarm and error in full."""
    found = versions()
    engine = ", ".join(f"{name} {version}" for name, version in found.items())
    judged = sum(tally.judged for tally in tallies.values())
    alarms = sum(len(tally.alarms) for tally in tallies.values())
    lines = [
        "# False alarms",
        "",
        "Written by `nox -s false_alarms`. Rollouts that are right, judged by all clauses with the seeds",
        f"{seeds[0]} to {seeds[-1]} for prompts, adapters and calibration, on one made model and one engine",
        f"({engine}, {device()}).",
        "",
        f"{judged} verdicts, {alarms} of them false."
        + (f" At 95 % confidence fewer than 1 in {judged / 3:.0f} is." if judged and not alarms else ""),
        "",
        "| rollout | what is odd | runs | verdicts | failures | errors | largest distance / allowed |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for case in CASES:
        tally = tallies[case.name]
        counts = [tally.runs, tally.judged, len(tally.alarms), len(tally.errors), f"{tally.largest:.2f}"]
        lines.append(f"| {case.name} | {case.fault} | {' | '.join(map(str, counts))} |")
    lines += ["", "An error is a clause that could not be judged, for lack of statistical power above all."]
    for name, tally in tallies.items():
        lines += [f"- {name}, failed: {told}" for told in tally.alarms]
        lines += [f"- {name}, error: {told}" for told in tally.errors]
    return "\n".join(lines) + "\n"


def _write(out: Path, text: str) -> None:
    out.write_text(text, encoding="utf-8")


async def main(seeds: Sequence[int], out: Path) -> bool:
    """Run all; say whether there was neither an alarm nor an error."""
    tallies = {case.name: Tally() for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        spec = RolloutSpec(str(make_model(Path(folder, "tiny-qwen2"))), dtype=dtype, workdir=folder)
        async with make(spec, sync="tensors") as running:
            for seed in seeds:
                bench = Bench()  # what one seed measured is of no use to the next
                settings = Settings(model=spec.model_path, dtype=dtype, seed=seed)
                for case in CASES:
                    start = functools.partial(started, case, running)
                    with distances() as found:
                        report = await check_rollout(start, settings, bench=bench)
                    tallies[case.name].add(seed, report, max(found, default=0.0))
                _write(out, markdown(tallies, seeds[: seeds.index(seed) + 1]))
                print(
                    f"seed {seed}: {sum(len(t.alarms) for t in tallies.values())} alarms so far", flush=True
                )
    return not any(tally.alarms or tally.errors for tally in tallies.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="how many seeds (default: 100)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("conformance/FALSE_ALARMS.md"))
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs is {given.runs}; it has to be at least 1")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    raise SystemExit(not asyncio.run(main(range(given.first, given.first + given.runs), given.out)))
