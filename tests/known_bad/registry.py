"""The list of cases, and how each is started on the shared engine or on one of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollproof.protocol import RolloutSpec
from rollproof_reference import AsyncRollout, start_engine
from rollproof_reference.sync import Sync
from rollproof_reference.sync.tensors import TensorSync

from . import extras, flight, lifecycle, modules, numbers, odd, requests, sampling, seed, updates
from .case import Case


def _tensors(_: RolloutSpec) -> Sync:
    return TensorSync()


def _never_removes(spec: RolloutSpec) -> Sync:
    return seed.NeverRemoves(spec.workdir)


KNOWN_BAD = (
    Case("samples-base", seed.SamplesBase, frozenset({"SYNC-002"}), "those of the base model"),
    Case("answers-too-early", seed.AnswersTooEarly, frozenset({"SYNC-001"}), "it has to raise"),
    Case(
        "adapter-for-base",
        seed.AdapterForBase,
        frozenset({"BASE-001", "SYNC-006", "NUM-005", "FLIGHT-002"}),  # each asks the base model
        "expected the base model; these logprobs are",
    ),
    Case("reuses-an-id", seed.ReusesAnId, frozenset({"ID-002"}), "no pair with both a new name and a new"),
    Case(
        "leaks-slowly",
        seed.LeaksSlowly,
        frozenset({"LIFE-002"}),
        "old adapters stay loaded: 2",
        # What was loaded stays in its slot's buffer: not in the last one, nor in an engine that is shared.
        engine={"max_loras": 3},
    ),
    Case("cuts-odd-ranks", updates.CutsOddRanks, frozenset({"RANK-001"}), "no candidate's"),
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
        does="Adds every version under the id that is loaded already, so vLLM keeps the first (verl#3821).",
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
        frozenset({"BASE-002", "FLIGHT-002"}),
        "expected the base model; these logprobs are",
        engine={"max_loras": 1},
        cpu_only=True,
        does="Fills vLLM's only slot, which its CPU kernels read for requests without an adapter.",
    ),
    Case(
        "keeps-absent-modules",
        updates.KeepsAbsentModules,
        frozenset({"NUM-001", "NUM-002"}),
        "alone: completion",
    ),
    Case("v-in-the-slot-of-k", modules.VInTheSlotOfK, frozenset({"NUM-001"}), "an adapter on v_proj alone"),
    Case(
        "up-in-the-slot-of-gate",
        modules.UpInTheSlotOfGate,
        frozenset({"NUM-001"}),
        "an adapter on up_proj alone",
    ),
    Case(
        "loses-the-ends",
        modules.LosesTheEnds,
        frozenset({"NUM-007", "NUM-008"}),
        "those of the base model",
        model="tiny-llama",  # vLLM takes such adapters for it, and none for a Qwen2
    ),
    Case("drops-rslora", updates.DropsRsLora, frozenset({"NUM-003"}), "'use_rslora': True"),
    Case("ignores-patterns", updates.IgnoresPatterns, frozenset({"RANK-002"}), "no candidate's"),
    Case(
        "scales-the-trainers",
        updates.ScalesTheTrainers,
        frozenset({"NUM-004", "SYNC-004"}),  # sent again, the adapter is another one
        "tensor",
    ),
    Case("reads-late", updates.ReadsLate, frozenset({"NUM-004"}), "no candidate's"),
    Case("takes-a-version-twice", updates.TakesAVersionTwice, frozenset({"SYNC-004"}), "a second time"),
    Case("races", updates.Races, frozenset({"SYNC-005"}), "those of version"),
    Case(
        "skips-what-it-cannot-place",
        updates.SkipsWhatItCannotPlace,
        frozenset({"FAIL-001"}),
        "success for an adapter with a wrapper's prefix",
    ),
    Case(
        "swallows-errors",
        updates.SwallowsErrors,
        frozenset({"SYNC-004", "RANK-003", "FAIL-001", "FAIL-003"}),
        "",  # four clauses, each in words of its own
    ),
    Case("finishes-on-new", flight.ClaimsToFinishOnOld, frozenset({"FLIGHT-001"}), "expected version"),
    Case("does-not-restart", flight.ClaimsToRestart, frozenset({"FLIGHT-001"}), "no candidate's"),
    Case(
        "base-while-updating", flight.BaseWhileUpdating, frozenset({"FLIGHT-002"}), "those of the base model"
    ),
    Case(
        "removes-under-requests",
        flight.RemovesUnderRequests,
        frozenset({"CACHE-002", "FLIGHT-001"}),
        "finish_reason 'abort'",
    ),
    Case("cancels-them-all", flight.CancelsThemAll, frozenset({"FLIGHT-003"}), "finish_reason 'abort'"),
    Case(
        "resets-while-busy",
        flight.ResetsWhileBusy,
        frozenset({"CACHE-002"}),
        "on the stale KV of version",
        sync=_tensors,
    ),
    Case(
        "remembers-answers",
        flight.RemembersAnswers,
        frozenset({"CACHE-003"}),
        "expected the base model; these logprobs are those of version",
    ),
    Case(
        "salt-of-one-digit",
        flight.SaltOfOneDigit,
        frozenset({"CACHE-004"}),
        "on the stale KV of version",
        sync=_tensors,
    ),
    Case(
        "drops-the-salt-under-load",
        flight.DropsTheSaltUnderLoad,
        frozenset({"CACHE-005"}),
        "on the stale KV of version",
        sync=_tensors,
    ),
    Case("drops-it-on-one-route", extras.DropsItOnOneRoute, frozenset({"SYNC-006"}), "route 'stream'"),
    Case(
        "trusts-the-checkpoint",
        extras.TrustsTheCheckpoint,
        frozenset({"SYNC-007"}),
        "with version 1000 the rollout's first: completion 1 of 8: expected version 1000",
    ),
    Case("skips-zero", extras.SkipsZero, frozenset({"SYNC-008"}), "every B is zero, which is the base model"),
    Case(
        "unloads-the-list-alone",
        extras.UnloadsTheListAlone,
        frozenset({"LIFE-004"}),
        "after unload_adapter: completion 1 of 8: expected the base model; these logprobs are those of",
    ),
    Case("scales-again", extras.ScalesAgain, frozenset({"LIFE-004"}), "sent again after it was unloaded"),
    Case(
        "loads-for-each-request",
        extras.LoadsForEachRequest,
        frozenset({"COST-001"}),
        "completions after the update to version",
    ),
    Case(
        "fills-up-with-zeros",
        extras.FillsUpWithZeros,
        frozenset({"COST-002"}),
        "an update with an adapter of 36864 bytes took",
    ),
    Case(
        "logs-a-load-error",
        extras.LogsALoadError,
        frozenset({"FAIL-004"}),
        "an adapter whose save raises for a full disk: completion 1 of 8: expected version",
    ),
    Case(
        "one-sample-in-four",
        extras.OneSampleInFour,
        frozenset({"SYNC-009"}),
        "of the 4 samples of one prompt: completion 2 of 4: expected version",
    ),
    Case("copies-the-sample", extras.CopiesTheSample, frozenset({"SYNC-009"}), "not drawn independently"),
    Case(
        "scores-the-base",
        extras.ScoresTheBase,
        frozenset({"NUM-005"}),
        "prompt_logprobs with the adapter: completion 1 of 4: expected version",
    ),
    Case(
        "wakes-without-the-adapter",
        extras.WakesWithoutTheAdapter,
        frozenset({"SLEEP-001", "SLEEP-002"}),
        "and wake(), cycle 1: completions with the adapter, asked before: completion 1 of 4: expected",
        engine={"enable_sleep_mode": True},
        gpu_only=True,
    ),
    Case(
        "wakes-without-the-base",
        extras.WakesWithoutTheBase,
        frozenset({"SLEEP-002"}),
        "after sleep(2) and wake(), cycle 1",
        engine={"enable_sleep_mode": True},
        gpu_only=True,
    ),
    Case("keeps-a-copy", extras.KeepsACopy, frozenset({"LIFE-003"}), "host memory grows by"),
    Case("refuses-the-same", extras.RefusesTheSame, frozenset({"SYNC-008"}), "has the tensors of version"),
    *requests.CASES,
    *numbers.CASES,
    *lifecycle.CASES,
    *sampling.CASES,
)

REFERENCE = Case("reference", AsyncRollout, does="The reference itself.")

ODD_BUT_RIGHT = odd.ODD


@asynccontextmanager
async def started(case: Case, running: AsyncRollout, spec: RolloutSpec) -> AsyncIterator[AsyncRollout]:
    """The case's rollout, on the engine of ``running`` unless it needs its own."""
    own = bool(case.engine or case.model)
    engine = start_engine(spec, **case.engine) if own else running.engine
    sync = case.sync(spec)
    try:
        served = running.served
        if case.model:
            served = (await engine.collective_rpc("rollproof_describe"))[0]["served"]
        yield case.rollout(engine, spec, sync, served)
    finally:
        sync.close()
        if own:
            engine.shutdown()
        else:
            for int_id in await engine.list_loras():
                await engine.remove_lora(int_id)
            assert await engine.reset_prefix_cache()
