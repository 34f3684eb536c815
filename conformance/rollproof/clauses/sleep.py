"""SLEEP: after sleep and wake, base and adapter are what they were, and updates go on."""

from __future__ import annotations

from collections.abc import Sequence

from ..outcome import FailureError, NotApplicableError, about
from ..protocol import Capability, GenerateRequest
from ..session import LONG_PROMPT, MAX_TOKENS, Session
from ..verify import RIVALS

CYCLES = 2
ASKED = 4


async def level_one(session: Session) -> str:
    """Level 1, which keeps the weights on the host."""
    return await _through(session, 1)


async def level_two(session: Session) -> str:
    """Level 2, which may drop them."""
    return await _through(session, 2)


async def _through(session: Session, level: int) -> str:
    if level not in session.subject.sleep_levels:
        levels = ", ".join(map(str, session.subject.sleep_levels))
        raise NotApplicableError(f"the rollout sleeps at the levels {levels} alone")
    for _ in range(RIVALS + 1):  # so that no completion is told apart from a weak adapter of another clause
        await session.update()
    sides = {"with the adapter": True, "of the base model": False}
    if not session.subject.has(Capability.BASE):
        del sides["of the base model"]
    # Prompts of several KV blocks, asked again after the wake: the KV that was freed must not be reused.
    length = min(LONG_PROMPT, session.subject.spec.max_model_len - MAX_TOKENS)
    asked = {
        side: session.requests(session.prompts(ASKED, length), MAX_TOKENS, adapter=adapter)
        for side, adapter in sides.items()
    }
    for side, requests in asked.items():
        with about(f"before sleep, completions {side}"):
            session.verify(await session.ask(requests))
    try:
        for cycle in range(CYCLES):
            await _sleep_and_wake(session, level)
            with about(f"after sleep({level}) and wake(), cycle {cycle + 1}"):
                told = [await _again(session, side, requests) for side, requests in asked.items()]
        await _sleep_and_wake(session, level)
        await session.update()
        with about(f"an update right after sleep({level}) and wake()"):
            after = await session.claim(True)
    except FailureError as failure:
        # What the device holds now is anybody's guess, so the clauses after this one get a fresh rollout.
        raise FailureError(str(failure), fatal=True, witness=failure.witness) from failure
    return f"{CYCLES} cycles, as before: {'; '.join(told)}; an update right after the next: {after}"


async def _sleep_and_wake(session: Session, level: int) -> None:
    await session.subject.sleep(level)
    await session.subject.wake()


async def _again(session: Session, side: str, requests: Sequence[GenerateRequest]) -> str:
    with about(f"completions {side}, asked before"):
        session.verify(await session.ask(requests))
    with about(f"completions {side}, of fresh prompts"):
        return f"{side} {await session.claim(requests[0].adapter)}"
