"""The smallest fault that each clause about numbers catches: measured, and written into SPEC.md.

``python tests/sensitivity.py``. The rollout is a model without an engine that computes in the dtype it
is asked for (``faulty``); it has one fault, only while the one clause runs. A size counts as caught if the
clause fails with every seed; the ladders are searched by halves, so a clause has to catch what is larger.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import faulty
from rollproof import Outcome, Result, Settings
from rollproof.bench import Bench
from rollproof.factory import Target
from rollproof.models import make_model
from rollproof.runner import Runner, device, versions
from rollproof.settings import DTYPES
from rollproof.spec import select

SPEC = Path(__file__).parents[1] / "conformance/rollproof/SPEC.md"
BEGIN, END = "<!-- sensitivity: written by nox -s sensitivity -->", "<!-- end of sensitivity -->"
SHAPE = "tiny-qwen2"
MOE = "tiny-qwen3-moe"
EITHER = (1, -1)

FRACTIONS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5, 1e-5)
MODULES = (7, 4, 2, 1)
COMPONENTS = (12, 4, 2, 1, *FRACTIONS)
PROMPT = (384, 128, 64, 16, 4, 1)
TAIL = (32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Row:
    """A clause, the rollout's name for the fault, the sizes to try from large to small, and it in words.

    A size counts as caught where it is with each of the ``signs``; ``shape`` is the made model.
    """

    clause: str
    fault: str
    sizes: tuple[float, ...]
    words: str
    signs: tuple[int, ...] = (1,)
    shape: str = SHAPE

    def told(self, size: float) -> str:
        """A size: fractions in percent, counts as they are, and parts of a count."""
        return f"{100 * size:.4g} %" if self.sizes[0] < 1 else f"{size:.4g}"


ROWS = (
    Row("SYNC-002", "scale", FRACTIONS, "the scale off by", EITHER),
    Row("SYNC-002", "modules lost", MODULES, "modules of 14 without their adapter"),
    Row("SYNC-003", "modules stale", MODULES, "modules of 14 left at the version before"),
    Row("SYNC-009", "scale", FRACTIONS, "the scale off by", EITHER),
    Row("BASE-001", "leak", FRACTIONS, "the adapter in base requests, at a fraction of its scale"),
    Row("BASE-002", "leak", FRACTIONS, "the adapter in base requests, at a fraction of its scale"),
    Row("RANK-001", "scale", FRACTIONS, "the scale off by", EITHER),
    Row("RANK-001", "rank lost", COMPONENTS, "components of rank 24 lost, or a part of one"),
    Row("RANK-002", "scale of patterns", FRACTIONS, "the alphas of alpha_pattern off by", EITHER),
    Row("NUM-001", "scale of k_proj", FRACTIONS, "the scale of k_proj off by", EITHER),
    Row("NUM-002", "scale of the last layer", FRACTIONS, "the scale of the last layer off by", EITHER),
    Row("NUM-003", "scale", FRACTIONS, "the scale off by", EITHER),
    Row("NUM-005", "scored", FRACTIONS, "in prompt_logprobs alone, the scale off by", EITHER),
    Row("NUM-007", "scale", FRACTIONS, "the scale on the embedding off by", EITHER),
    Row("NUM-008", "scale", FRACTIONS, "the scale on the output layer off by", EITHER),
    Row("NUM-009", "scale", FRACTIONS, "the scale on an expert off by", EITHER, MOE),
    Row("CACHE-001", "stale", PROMPT, "prompt tokens of 400 with the old version's KV"),
    Row("CACHE-003", "stale", PROMPT, "prompt tokens of 400 with the other model's KV"),
    Row("FLIGHT-001", "drift", TAIL, "last tokens of 64 by the new version, under finish-on-old"),
    Row("FLIGHT-001", "gap", TAIL, "tokens of 64 by the base model at the update, under continue-mixed"),
)


async def alone(bench: Bench, model: Path, dtype: str, seed: int, row: Row, size: float) -> Result:
    """What the clause alone makes of the fault: those it requires would meet it before."""
    settings = Settings(model=str(model), dtype=dtype, seed=seed, only=(row.clause,))
    target = Target("faulty:make", faulty.make, {"fault": row.fault, "size": str(size)})
    runner = Runner(target, settings, bench=bench)
    try:
        return await runner.run(select([row.clause])[-1])
    finally:
        await runner.close()


async def outcome(bench: Bench, model: Path, dtype: str, seed: int, row: Row, size: float) -> Outcome:
    """How the clause alone comes out."""
    return (await alone(bench, model, dtype, seed, row, size)).outcome


async def smallest(bench: Bench, model: Path, dtype: str, seeds: Sequence[int], row: Row) -> str:
    """The smallest size that is caught with every seed. Raises where a right rollout doesn't pass."""
    for seed in seeds:
        if (found := await outcome(bench, model, dtype, seed, row, 0)) != Outcome.PASS:
            raise RuntimeError(f"{row.clause} in {dtype} with seed {seed}: {found} without a fault")
    seen, unseen = -1, len(row.sizes)
    while unseen - seen > 1:
        middle = (seen + unseen) // 2
        if await _caught(bench, model, dtype, seeds, row, row.sizes[middle]):
            seen = middle
        else:
            unseen = middle
    if seen < 0:
        return f"not even {row.told(row.sizes[0])}"
    least = row.sizes[seen]
    return row.told(least) if least == 1 or seen < len(row.sizes) - 1 else f"{row.told(least)} or less"


async def _caught(bench: Bench, model: Path, dtype: str, seeds: Sequence[int], row: Row, size: float) -> bool:
    for seed, sign in itertools.product(seeds, row.signs):
        if await outcome(bench, model, dtype, seed, row, sign * size) != Outcome.FAIL:
            return False
    return True


def section(cells: dict[Row, list[str]], seeds: Sequence[int]) -> str:
    """The figures as SPEC.md has them."""
    made = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "vllm")
    lines = [
        f"The smallest fault that each clause about numbers caught with every one of the seeds {seeds[0]} to",
        f"{seeds[-1]}, on the made model {SHAPE}, that of experts on {MOE}",
        f"({made}; {device()}).",
        "The rollout was one without an engine: the model in the dtype of the column, base and adapter kept",
        "apart, in batches, token by token on its KV. Without a fault each clause passed with every seed.",
        "Scales are too large or too small by so much: what is stated was caught either way. Fractions were",
        "tried in steps of 1, 2 and 5, so the true limit may be up to two and a half times lower. On another",
        "model or engine the figures go with",
        "the tolerance that each run measures. Which modules are lost differs from version to version.",
        "",
        f"| clause | fault | {' | '.join(DTYPES)} |",
        f"|---|---|{'--:|' * len(DTYPES)}",
        *(f"| {row.clause} | {row.words} | {' | '.join(cells[row])} |" for row in cells),
        "",
        "Not measured: clauses that claim what one above does, as CACHE-002, FLIGHT-002 and SLEEP-001;",
        "and those that compare no logprobs.",
    ]
    return "\n".join(lines) + "\n"


def inserted(spec: str, text: str) -> str:
    """SPEC.md with the section, in place of the one it has, before the clauses."""
    head, found, clauses = spec.partition("\n## Clauses\n")
    if not found:
        raise ValueError("SPEC.md has no heading '## Clauses', before which the section belongs")
    head = head.partition(f"\n## Sensitivity\n\n{BEGIN}\n")[0]
    return f"{head}\n## Sensitivity\n\n{BEGIN}\n{text}{END}\n{found}{clauses}"


async def main(seeds: Sequence[int], out: Path | None, only: Sequence[str]) -> None:
    """Measure, and write the section to ``out``, or into SPEC.md; of ``only`` some clauses, print alone."""
    cells: dict[Row, list[str]] = {row: [] for row in ROWS if not only or row.clause in only}
    with tempfile.TemporaryDirectory() as folder:
        models = {shape: make_model(Path(folder, shape), shape) for shape in {row.shape for row in cells}}
        for dtype in DTYPES:
            bench = Bench()
            for row in cells:
                began = time.monotonic()
                cells[row].append(await smallest(bench, models[row.shape], dtype, seeds, row))
                seconds = time.monotonic() - began
                print(f"{row.clause} {dtype}: {row.words}: {cells[row][-1]} ({seconds:.0f} s)", flush=True)
    text = section(cells, seeds)
    if out is not None:
        _write(out, text)
    elif not only:
        _write(SPEC, inserted(SPEC.read_text(encoding="utf-8"), text))


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many (default: 5)")
    parser.add_argument("--out", type=Path, help="write the section to this file (default: into SPEC.md)")
    parser.add_argument("--only", default="", help="measure these clauses (A,B) and leave SPEC.md as it is")
    given = parser.parse_args()
    chosen = [name for name in given.only.split(",") if name]
    if unknown := set(chosen) - {row.clause for row in ROWS}:
        parser.error(f"--only: no figure is measured for {', '.join(sorted(unknown))}")
    if given.seeds < 1:
        parser.error(f"--seeds is {given.seeds}; it has to be at least 1")
    torch.set_num_threads(1)
    asyncio.run(main(range(given.seeds), given.out, chosen))
