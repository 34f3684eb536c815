"""SYNC: the newest adapter is the one that is sampled."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..outcome import FailureError, RaisedError, about
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
    except RaisedError as error:
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


async def resent(session: Session) -> str:
    """One version twice: with the same tensors, and with others."""
    adapter = await session.update()
    await session.serve(adapter)
    told = await session.claim(True)
    other = replace(session.adapter(), version=adapter.version)
    if await session.offer(other) is None:
        raise FailureError(
            f"update_adapter reported success for version {adapter.version} a second time, with other "
            "tensors: it has to raise, since nobody can tell the two apart any more",
            fatal=True,
        )
    after = await session.claim(True)
    return f"the same tensors again: {told}; others refused, the first still serving: {after}"


async def concurrent(session: Session) -> str:
    """Two updates sent at once, the higher version second."""
    first = session.adapter()
    session.oracle.add(first)
    second = session.adapter()
    errors = await asyncio.gather(session.push(first), session.push(second))
    if errors[1] is not None:
        raise FailureError(f"version {second.version}, sent beside {first.version}, was refused: {errors[1]}")
    older = "served in passing" if errors[0] is None else f"refused ({errors[0]})"
    return f"version {first.version} {older}; then version {second.version}: {await session.claim(True)}"


async def every_route(session: Session) -> str:
    """Each route after each of two updates, with the adapter and, apart from it, without."""
    asked = [True, False] if session.subject.has(Capability.BASE) else [True]
    for _ in range(2):
        adapter = await session.update()
        for route in session.subject.routes:
            for with_adapter in asked:
                with about(f"route {route!r} after version {adapter.version}"):
                    told = await _claim_on(session, route, with_adapter)
    routes = ", ".join(map(repr, session.subject.routes))
    return f"{routes}, each after two updates; last: {told}"


async def _claim_on(session: Session, route: str, adapter: bool) -> str:
    async def attempt(n_tokens: int) -> str:
        requests = session.requests(session.prompts(), n_tokens, adapter=adapter)
        return session.verify(await session.ask([replace(request, route=route) for request in requests]))

    return await session.grow(attempt)
