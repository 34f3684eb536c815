"""COST: what an update and the generation after it may cost, by counters and not by seconds."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..outcome import FailureError, NotApplicableError, UnderpoweredError
from ..session import MAX_TOKENS, Session

UPDATES = 3
ASKED = 4
FACTOR = 4
"""Twice for a dtype wider than the engine's, twice for a rank rounded up to the next size it has."""


async def read_once(session: Session) -> str:
    """The reads of each update, and those of the completions after it."""
    for _ in range(UPDATES):
        before = await _counted(session, "adapter_reads")
        adapter = await session.update()
        after = await _counted(session, "adapter_reads")
        if after - before != 1:
            raise FailureError(
                f"the update to version {adapter.version} read the adapter {after - before} times (allowed 1)"
            )
        told = await session.claim(True)
        if (later := await _counted(session, "adapter_reads")) != after:
            raise FailureError(
                f"completions after the update to version {adapter.version} read the adapter "
                f"{later - after} times (allowed 0)"
            )
    return f"{UPDATES} updates, each with one read, and none by completions; last: {told}"


async def small(session: Session) -> str:
    """The bytes of an update with an adapter on one kind of module, which is small beside the model."""
    layers = session.oracle.layers()
    size = torch.empty(0, dtype=getattr(torch, session.subject.spec.dtype)).element_size()
    adapters = [
        session.adapter(rank=session.subject.spec.max_lora_rank, target_modules=[leaf])
        for leaf in sorted({name.rpartition(".")[2] for name in layers})
    ]
    adapter = min(adapters, key=lambda one: sum(t.numel() for t in one.tensors.values()))
    own = size * sum(tensor.numel() for tensor in adapter.tensors.values())
    whole = size * sum(weight.numel() for weight in layers.values())
    if FACTOR * own >= whole:
        raise UnderpoweredError(
            f"underpowered: {FACTOR} times the adapter's {own} bytes are no less than the {whole} of the "
            "model's layers, so an update that sends those would pass; use a larger model or a lower rank"
        )
    before = await _counted(session, "adapter_bytes")
    await session.serve(adapter)
    moved = await _counted(session, "adapter_bytes") - before
    if not 0 < moved <= FACTOR * own:
        raise FailureError(
            f"an update with an adapter of {own} bytes took {moved} (allowed: more than none, and at most "
            f"{FACTOR * own}; the model's layers have {whole})"
        )
    return f"{moved} bytes for an adapter of {own}; the model's layers have {whole}"


async def same_steps(session: Session) -> str:
    """Forward passes for completions of one size, one at a time: twice before an update, once after."""
    await session.update()
    first, second = await _steps(session), await _steps(session)
    if first != second:
        raise NotApplicableError(
            f"{ASKED} completions took {first} steps and then {second}, without an update between them: "
            "their number is not fixed, as with speculative decoding"
        )
    await session.update()
    if (after := await _steps(session)) > second:
        raise FailureError(f"{ASKED} completions took {second} steps before an update and {after} after it")
    return (
        f"{ASKED} completions of {MAX_TOKENS} tokens took {second} steps before an update, {after} after it"
    )


async def _steps(session: Session) -> int:
    before = await _counted(session, "engine_steps")
    for request in session.requests(session.prompts(ASKED), MAX_TOKENS):
        session.verify(await session.ask([replace(request, temperature=0.0)]))
    took = await _counted(session, "engine_steps") - before
    if took < ASKED:
        raise FailureError(f"{ASKED} completions took {took} steps by the rollout's count: it can't be right")
    return took


async def _counted(session: Session, name: str) -> int:
    counted = await session.subject.counters()
    if name not in counted:
        raise NotApplicableError(f"the rollout's counters have no {name!r}, only {', '.join(counted)}")
    return counted[name]
