"""The list of cases, and how each is started on the shared engine or on one of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollproof.protocol import RolloutSpec
from rollproof_reference import AsyncRollout, start_engine
from rollproof_reference.sync import Sync
from rollproof_reference.sync.disk import DiskSync
from rollproof_reference.sync.tensors import TensorSync

from . import seed


@dataclass(frozen=True)
class Case:
    """One rollout: ``fails`` is the exact set, blocked clauses apart; ``word`` is in each message.

    ``engine`` are engine arguments that need an engine of its own; ``cpu_only`` marks faults of
    vLLM's CPU kernels.
    """

    name: str
    rollout: type[AsyncRollout]
    fails: frozenset[str] = frozenset()
    word: str = ""
    sync: Callable[[RolloutSpec], Sync] = lambda spec: DiskSync(spec.workdir)
    engine: dict[str, Any] = field(default_factory=dict)
    cpu_only: bool = False


def _tensors(_: RolloutSpec) -> Sync:
    return TensorSync()


def _never_removes(spec: RolloutSpec) -> Sync:
    return seed.NeverRemoves(spec.workdir)


KNOWN_BAD = (
    Case("samples-base", seed.SamplesBase, frozenset({"SYNC-002"}), "those of the base model"),
    Case("random-id", seed.RandomId, frozenset({"ID-001"}), "declares a stable id"),
    Case(
        "keeps-old",
        seed.KeepsOld,
        frozenset({"LIFE-001"}),
        "old adapters stay loaded",
        # One slot more than are ever loaded: vLLM's CPU kernels need the last one empty.
        engine={"max_loras": seed.KeepsOld.kept + 1},
    ),
    Case(
        "first-adapter-for-ever",
        AsyncRollout,
        frozenset({"SYNC-003"}),
        "those of version",
        sync=_never_removes,
    ),
    Case(
        "no-lora-config",
        seed.NoLoraConfig,
        frozenset({"SYNC-002"}),
        "LoRA is not enabled",
        engine={"enable_lora": False},
    ),
    Case("stale-kv", seed.StaleKV, frozenset({"CACHE-001"}), "on the stale KV of version", sync=_tensors),
    Case(
        "one-slot-on-the-cpu",
        AsyncRollout,
        frozenset({"BASE-002"}),
        "expected the base model; these logprobs are those of version",
        engine={"max_loras": 1},
        cpu_only=True,
    ),
)

ODD_BUT_RIGHT = (Case("versioned-ids", seed.VersionedIds),)


@asynccontextmanager
async def started(case: Case, running: AsyncRollout, spec: RolloutSpec) -> AsyncIterator[AsyncRollout]:
    """The case's rollout, on the engine of ``running`` unless it needs its own."""
    engine = start_engine(spec, **case.engine) if case.engine else running.engine
    sync = case.sync(spec)
    try:
        yield case.rollout(engine, spec, sync, running.served)
    finally:
        sync.close()
        if case.engine:
            engine.shutdown()
        else:
            for int_id in await engine.list_loras():
                await engine.remove_lora(int_id)
            assert await engine.reset_prefix_cache()
