"""A run says what it will cost, and what it covered."""

from __future__ import annotations

import json
from pathlib import Path

import toy
from rollproof import Outcome, Settings, check_rollout
from rollproof.cost import parameters, starts, told
from rollproof.coverage import lines
from rollproof.models import made_parameters
from rollproof.oracle import Oracle
from rollproof.report import report_json
from rollproof.spec import clauses, select


def test_parameters_are_counted_without_reading_weights(
    model_path: Path, base_oracle: Oracle, tmp_path: Path
):
    count = sum(parameter.numel() for parameter in base_oracle._base.parameters())
    assert parameters(model_path) == made_parameters("tiny-qwen2") == count
    head = (model_path / "model.safetensors").read_bytes()
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(head)
    weight_map = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    assert parameters(tmp_path) == 2 * count
    assert parameters(tmp_path / "nothing") is None


def test_the_cost_names_the_memory_and_where_it_is(model_path: Path):
    size = 4 * made_parameters("tiny-qwen2")
    line = told(Settings(model=str(model_path), oracle_device="meta"), select(["SYNC-002"]))
    assert line == (
        "clauses: 1; starts of the rollout: 1 (more where one breaks it); "
        "updates: about 1; requests: about 8; oracle: up to "
        f"{9 * size / 1e9:.2g} GB (float32, base and 8 merged) on meta"
    )


def test_every_fresh_clause_but_the_first_costs_a_start():
    assert starts(select(["SYNC-001", "SYNC-003"])) == 1
    assert starts(select(["SYNC-007"])) == 2
    assert starts(clauses()) == sum(clause.fresh for clause in clauses())


async def test_the_calls_of_a_run_are_about_those_told_before(model_path: Path):
    ids = ("SYNC-001", "SYNC-008", "BASE-002", "RANK-001", "NUM-001", "NUM-002", "NUM-004", "LIFE-001")
    report = await check_rollout(toy.make, Settings(model=str(model_path), only=ids))
    told = {clause.id: clause.calls for clause in clauses()}
    for result in report.results:
        assert result.outcome == Outcome.PASS
        assert (result.updates, result.completions) == told[result.clause]


def test_every_clause_says_how_much_it_asks():
    assert [clause.id for clause in clauses() if clause.calls == (0, 0)] == []


async def test_a_report_says_what_was_judged_and_what_would_make_more_applicable(model_path: Path):
    settings = Settings(model=str(model_path), seed=5, only=("SYNC-001", "ID-001", "CACHE-003"))
    report = await check_rollout(toy.make, settings)
    covered, *without, under = lines(report_json(report))
    # SYNC-001 asks before any update; SYNC-002, SYNC-003 and BASE-001 send one, five and one.
    told = f"4 of the {len(clauses())} clauses of the specification judged, by 7 updates and "
    assert covered.startswith(told)
    assert sum(result.completions for result in report.results) >= 8 * 8
    assert without == [
        "not applicable without stable-id: ID-001",
        "not applicable without prefix-cache: CACHE-001, CACHE-003",
    ]
    assert under == f"{model_path}, float32, seed 5"


async def test_what_was_blocked_was_not_judged_though_it_was_expected(model_path: Path, tmp_path: Path):
    known = tmp_path / "known.toml"
    known.write_text('[SYNC-003]\nreason = "r"\n[SYNC-004]\nreason = "r"\n')
    settings = Settings(model=str(model_path), only=("SYNC-004",), baseline=str(known))
    report = await check_rollout(toy.make, settings, fault="forgets")
    assert report.outcomes(Outcome.EXPECTED_FAIL) == {"SYNC-003", "SYNC-004"}
    assert lines(report_json(report))[0].startswith(f"2 of the {len(clauses())} clauses")
