"""A known fault of the engine is named beside the failure it may have caused, and excuses nothing."""

from __future__ import annotations

import copy
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from packaging.specifiers import SpecifierSet

import toy
from rollproof import Outcome, Settings, check_rollout
from rollproof.report import report_json, schema
from rollproof.spec import clauses
from rollproof.upstream import Fault, faults, known

CPU, GPU = "CPU (x86_64, 2 threads)", "NVIDIA H200"
STALE = "expected version 2; these logprobs are those of version 2 on the stale KV of version 1"


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.clauses[0])
def test_every_fault_is_whole(fault: Fault):
    assert SpecifierSet(fault.versions)
    assert set(fault.clauses) <= {clause.id for clause in clauses()}
    assert fault.text
    assert fault.device in ("", "cpu")


@pytest.mark.parametrize(
    ("engine", "device", "clause_id", "failure", "found"),
    [
        ("vLLM 0.32.0", GPU, "CACHE-001", STALE, True),
        ("vLLM 0.25.1", GPU, "CACHE-001", STALE, True),
        ("vLLM 0.32.0+cpu", CPU, "CACHE-001", STALE, True),
        ("vLLM 0.34.0", GPU, "CACHE-001", STALE, False),
        ("vLLM 0.33.1rc1.dev7+g1a2b3c", GPU, "CACHE-001", STALE, True),
        ("vLLM 0.34.0rc1", GPU, "CACHE-001", STALE, False),
        ("vLLM unknown", GPU, "CACHE-001", STALE, False),
        ("SGLang 0.32.0", GPU, "CACHE-001", STALE, False),
        ("", GPU, "CACHE-001", STALE, False),
        ("vLLM 0.32.0", GPU, "SYNC-003", STALE, False),
        ("vLLM 0.32.0", GPU, "CACHE-001", "expected version 2; these logprobs are those of version 1", False),
        ("vLLM 0.32.0", CPU, "BASE-002", "expected the base model; these logprobs are those of", True),
        ("vLLM 0.32.0", GPU, "BASE-002", "expected the base model; these logprobs are those of", False),
        ("vLLM 0.32.0", CPU, "BASE-002", "expected version 2; these logprobs are those of", False),
        ("vLLM 0.32.0", CPU, "CACHE-005", "generate raised EngineDeadError: see above", True),
        (
            "vLLM 0.32.0",
            CPU,
            "FAIL-001",
            "success for an adapter with a wrapper's prefix on every name",
            True,
        ),
        ("vLLM 0.32.0", CPU, "FAIL-001", "success for an adapter with NaN in one tensor", False),
    ],
)
def test_a_fault_is_named_where_all_of_it_fits(engine, device, clause_id, failure, found):
    assert bool(known(engine, device, clause_id, failure)) == found


class OnVLLM(toy.Toy):
    """Ignores alpha_pattern, as the engine does that it says it runs on."""

    details = {"engine": "vLLM 0.25.1"}  # noqa: RUF012 - as a rollout would write it

    async def update_adapter(self, adapter):
        config = copy.deepcopy(adapter.config)
        config.alpha_pattern = {}
        await super().update_adapter(replace(adapter, config=config))


async def test_the_failure_stays_one_and_says_what_the_engine_is_known_for(model_path: Path):
    @asynccontextmanager
    async def make(spec):
        yield OnVLLM(spec)

    report = await check_rollout(make, Settings(model=str(model_path), only=("RANK-002",)))
    assert report.outcomes(Outcome.FAIL) == {"RANK-002"}
    result = report.results[-1]
    assert result.upstream.startswith("rank_pattern and alpha_pattern are ignored")
    assert result.message.endswith(f"\nknown fault of vLLM 0.25.1: {result.upstream}")
    assert {other.upstream for other in report.results[:-1]} == {""}
    jsonschema.validate(report_json(report), schema())
