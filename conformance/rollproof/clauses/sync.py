"""SYNC: the newest adapter is the one that is sampled."""

from __future__ import annotations

from ..outcome import FailureError
from ..protocol import Capability
from ..session import MAX_TOKENS, Session

UPDATES = 5


async def before_first_update(session: Session) -> str:
    """An adapter request before any update: the base model, or an error, as declared."""
    if session.subject.has(Capability.BASE_BEFORE_SYNC):
        # A version that is never sent stands beside the base model, so that a match says something.
        session.oracle.add(session.adapter())
        return await session.claim(True)
    request = session.requests(session.prompts(1), MAX_TOKENS)[0]
    try:
        await session.subject.generate(request)
    except FailureError as error:
        return f"refused, as declared: {error}"
    raise FailureError(
        "an adapter request before the first update was answered, and the rollout doesn't declare "
        f"{Capability.BASE_BEFORE_SYNC}: it has to raise"
    )


async def applied(session: Session) -> str:
    """One update, then requests."""
    await session.update()
    return await session.claim(True)


async def right_version(session: Session) -> str:
    """Several updates, requests after each."""
    for _ in range(UPDATES):
        await session.update()
        told = await session.claim(True)
    return f"{UPDATES} updates; last: {told}"
