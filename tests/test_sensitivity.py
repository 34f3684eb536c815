"""The figures in SPEC.md are those of the rows there are, and the rollout they come from is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

import sensitivity
from rollproof import Outcome
from rollproof.bench import Bench
from rollproof.models import make_model
from rollproof.settings import DTYPES
from sensitivity import MOE, ROWS, SHAPE, Row, inserted, outcome, section, smallest

HERE = Path()
SIZES = (0.5, 0.2, 0.1, 0.05, 0.02)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="module")
def models(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {SHAPE: model_path, MOE: make_model(tmp_path_factory.mktemp("moe"), MOE)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.clause}, {row.fault}")
async def test_each_clause_passes_without_the_fault_and_catches_a_large_one(
    bench: Bench, models: dict[str, Path], row: Row
):
    for size, expected in ((0, Outcome.PASS), *((sign * row.sizes[0], Outcome.FAIL) for sign in row.signs)):
        assert await outcome(bench, models[row.shape], "float32", 0, row, size) == expected


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({0: 0.07, 1: 0.04}, "10 %"),
        ({0: 0.02, 1: 0.2}, "20 %"),
        ({0: 0.001, 1: 0.001}, "2 % or less"),
        ({0: 0.01, 1: 0.9}, "not even 50 %"),
    ],
)
async def test_the_smallest_size_is_what_every_seed_catches(
    monkeypatch: pytest.MonkeyPatch, limits: dict[int, float], told: str
):
    async def known(bench, model, dtype, seed, row, size):
        return Outcome.FAIL if size >= limits[seed] else Outcome.PASS

    monkeypatch.setattr(sensitivity, "outcome", known)
    assert await smallest(Bench(), HERE, "float32", (0, 1), Row("NUM-003", "scale", SIZES, "")) == told


@pytest.mark.parametrize(("signs", "told"), [((1,), "5 %"), ((1, -1), "20 %")])
async def test_of_two_signs_the_worse_counts(
    monkeypatch: pytest.MonkeyPatch, signs: tuple[int, ...], told: str
):
    async def lopsided(bench, model, dtype, seed, row, size):
        return Outcome.FAIL if size >= 0.05 or size <= -0.1001 else Outcome.PASS

    monkeypatch.setattr(sensitivity, "outcome", lopsided)
    assert await smallest(Bench(), HERE, "float32", (0, 1), Row("A-001", "scale", SIZES, "", signs)) == told


@pytest.mark.parametrize("wrong", [Outcome.FAIL, Outcome.ERROR, Outcome.NOT_APPLICABLE])
async def test_a_clause_that_fails_a_right_rollout_has_no_figure(
    monkeypatch: pytest.MonkeyPatch, wrong: Outcome
):
    async def always(bench, model, dtype, seed, row, size):
        return wrong

    monkeypatch.setattr(sensitivity, "outcome", always)
    with pytest.raises(RuntimeError, match=f"seed 3: {wrong} without a fault"):
        await smallest(Bench(), HERE, "float32", (3,), ROWS[0])


def test_a_section_takes_the_place_of_the_one_before_it():
    once = inserted("# A\n\ntext\n\n## Clauses\n\n### SYNC\n", "one\n")
    assert once.index("text") < once.index("## Sensitivity") < once.index("one") < once.index("## Clauses")
    assert inserted(once, "two\n") == once.replace("one", "two")
    with pytest.raises(ValueError, match="no heading '## Clauses'"):
        inserted("# A\n", "one\n")


def test_the_specification_has_a_figure_for_every_row():
    spec = sensitivity.SPEC.read_text(encoding="utf-8")
    table = [
        line.split(" | ") for line in section({row: ["?"] * len(DTYPES) for row in ROWS}, (0,)).splitlines()
    ]
    rows = [cells[:2] for cells in table if cells[-1] == "? |"]
    found = [line.split(" | ") for line in spec.splitlines() if line.startswith("| ")]
    told = {tuple(cells[:2]): cells[2:] for cells in found}
    assert len(rows) == len(ROWS)
    for clause, words in rows:
        assert len(told.get((clause, words), ())) == len(DTYPES), "run: nox -s sensitivity"
