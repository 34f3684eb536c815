"""sync=auto takes what suits, and says why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rollproof.protocol import RolloutSpec
from rollproof_reference import make, start
from rollproof_reference.choice import FOLD_FROM, choose


@pytest.mark.parametrize(
    ("tokens", "name", "why"),
    [
        (None, "arena", "keeps base requests"),
        (FOLD_FROM - 1, "arena", "don't make up for folding"),
        (FOLD_FROM, "fold", "make up for folding"),
    ],
)
def test_the_tokens_between_two_updates_decide(tokens: int | None, name: str, why: str):
    chosen, told = choose(tokens)
    assert chosen == name
    assert why in told


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which engines were started; one of them is no engine to fold on."""
    found: list[str] = []

    @asynccontextmanager
    async def started(spec: RolloutSpec, sync: str, *_: Any) -> AsyncIterator[Any]:
        found.append(sync)
        if sync == "fold" and spec.dtype == "float16":
            raise start.UnsuitedError("its weights are quantised")
        yield SimpleNamespace(details={"sync": sync})

    monkeypatch.setattr(start, "_started", started)
    return found


async def test_the_report_says_what_was_chosen(engines: list[str], spec: RolloutSpec):
    async with make(spec, sync="auto", tokens_per_update="100000") as rollout:
        assert rollout.details["sync"].startswith("fold (100000 tokens per update make up")
    async with make(spec, sync="auto") as rollout:
        assert rollout.details["sync"].startswith("arena (it keeps base requests")
    assert engines == ["fold", "arena"]


async def test_where_folding_can_not_be_the_arena_is(engines: list[str], tmp_path: Any):
    async with make(
        RolloutSpec(str(tmp_path), dtype="float16"), sync="auto", tokens_per_update="9999"
    ) as one:
        assert one.details["sync"] == "arena (its weights are quantised)"
    assert engines == ["fold", "arena"]


@pytest.mark.parametrize("tokens", ["0", "many", "-3", "1.5"])
async def test_other_than_a_number_of_tokens_is_refused(engines: list[str], spec: RolloutSpec, tokens: str):
    with pytest.raises(ValueError, match=r"tokens_per_update is .*: it has to be"):
        async with make(spec, sync="auto", tokens_per_update=tokens):
            pass
    assert not engines
