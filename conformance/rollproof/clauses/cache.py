"""CACHE: no token is computed from KV that other weights left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ..candidates import BASE, Candidate, on_stale_kv
from ..flight import policy
from ..outcome import FailureError, NotApplicableError, UnderpoweredError
from ..protocol import Capability, GenerateRequest
from ..session import LONG_PROMPT, MAX_TOKENS, Session

_BLOCK = 128
_CROWD = 16
_CHAINED = 4

VERSIONS = 11
"""More than ten, so that a salt of a version's last digit meets an old one."""


async def idle(session: Session) -> str:
    """One prompt, before and after an update, with nothing else running."""

    async def attempt(n_tokens: int) -> str:
        older = await session.update()
        newer = session.adapter()
        session.oracle.add(newer)
        (request,) = _telling(session, n_tokens, older.version, newer.version)
        hit = await _hit(session, [request])
        await session.serve(newer)
        told = session.verify(await session.ask([request]), [on_stale_kv(older.version, newer.version, hit)])
        return f"{hit} of {len(request.prompt_token_ids)} prompt tokens were reused before the update; {told}"

    return await session.grow(attempt, _length(session))


async def beside_running(session: Session) -> str:
    """The same, while a request of the old version still holds its KV."""
    busy_tokens = session.subject.spec.max_model_len - _length(session)

    async def attempt(n_tokens: int) -> str:
        older = await session.update()
        newer = session.adapter()
        session.oracle.add(newer)
        (request,) = _telling(session, n_tokens, older.version, newer.version)
        hit = await _hit(session, [request])
        (long,) = session.requests([request.prompt_token_ids], busy_tokens)
        running = asyncio.ensure_future(session.subject.generate(long))
        try:
            (again,) = await session.ask([request])  # when it is back, the long one has long begun
            await session.serve(newer)
            (after,) = await session.ask([request])
            if running.done():
                running.result()  # it may have broken the protocol's form
            held = not running.done()
        finally:
            running.cancel()
            await asyncio.wait([running])
        if not held and policy(session.subject.capabilities) not in (None, Capability.CONTINUE_MIXED):
            raise NotApplicableError("by the declared policy no request of an old version outlives an update")
        if not held:
            raise UnderpoweredError(
                f"underpowered: a request of {busy_tokens} tokens ended before the update and another one did"
            )
        session.verify([again])
        told = session.verify([after], [on_stale_kv(older.version, newer.version, hit)])
        return f"beside a request of version {older.version}: {told}"

    return await session.grow(attempt, _length(session))


async def across(session: Session) -> str:
    """One prompt with and without the adapter, in both orders, with no update between."""

    async def attempt(n_tokens: int) -> str:
        told = []
        for first in (True, False):
            version = (await session.update()).version
            order = (version, BASE) if first else (BASE, version)
            (request,) = _telling(session, n_tokens, *order, adapter=first)
            hit = await _hit(session, [request])
            (other,) = session.requests([request.prompt_token_ids], n_tokens, adapter=not first)
            told.append(session.verify(await session.ask([other]), [on_stale_kv(*order, hit)]))
        return f"the base after the adapter: {told[0]}; the adapter after the base: {told[1]}"

    return await session.grow(attempt, _length(session))


async def many_versions(session: Session) -> str:
    """The same prompts under many versions in a row.

    No prompt tells all versions apart: of some, one at a time has to.
    """

    async def attempt(n_tokens: int) -> str:
        chain = [await session.update()]
        requests = _telling(session, n_tokens, BASE, chain[0].version, count=_CHAINED)
        hit = await _hit(session, requests)
        for _ in range(VERSIONS):
            newer = await session.update()
            answers = await session.ask(requests)
            stale = [on_stale_kv(older.version, newer.version, hit) for older in reversed(chain)]
            try:
                told = session.verify(answers, stale[:1], telling=1)
            except FailureError:
                session.verify(answers, stale)  # which says whose KV it was
                raise
            chain.append(newer)
        return f"{_CHAINED} prompts under {VERSIONS} more versions; last: {told}"

    return await session.grow(attempt, _length(session))


async def crowded(session: Session) -> str:
    """Many long prompts at once, before and after an update."""

    async def attempt(n_tokens: int) -> str:
        older = await session.update()
        newer = session.adapter()
        session.oracle.add(newer)
        asked = _telling(session, n_tokens, older.version, newer.version, count=_CROWD)
        # Greedy alone: vLLM's CPU build dies of a seeded request whose prompt is computed in chunks.
        requests = [replace(r, temperature=0.0) for r in asked]
        await session.ask(requests)
        hits = [e.completion.num_cached_tokens or 0 for e in await session.ask(requests)]
        if not min(hits):
            raise NotApplicableError(f"of {_CROWD} long prompts at once, {hits.count(0)} left no KV to reuse")
        await session.serve(newer)
        stale = on_stale_kv(older.version, newer.version, min(*hits, _length(session) - 1))
        return session.verify(await session.ask(requests), [stale])

    return await session.grow(attempt, _length(session))


def _length(session: Session) -> int:
    return min(LONG_PROMPT, session.subject.spec.max_model_len - MAX_TOKENS)


async def _hit(session: Session, requests: Sequence[GenerateRequest]) -> int:
    """Ask twice, and see how many prompt tokens the second time reused; a fault can't show without."""
    session.verify(await session.ask(requests), telling=1)
    hits = [e.completion.num_cached_tokens for e in await session.ask(requests)]
    length = len(requests[0].prompt_token_ids)
    if None in hits:
        raise FailureError("the rollout declares prefix-cache, and completions have no num_cached_tokens")
    hit = min(hit for hit in hits if hit is not None)
    if hit == 0:
        raise NotApplicableError(
            f"a prompt of {length} tokens asked twice reused no KV, so a fault can't show; "
            f"turn prefix caching on to have this judged, or don't declare {Capability.PREFIX_CACHE}"
        )
    return min(hit, length - 1)


def _telling(
    session: Session, n_tokens: int, older: int, newer: int, *, count: int = 1, adapter: bool = True
) -> list[GenerateRequest]:
    """Requests that tell the newer version from the older, from the base model, and from stale KV."""
    length = _length(session)
    kept = max(1, min(length // _BLOCK * _BLOCK, length - 1))
    wrong: list[Candidate] = [on_stale_kv(older, newer, kept), *({older, BASE} - {newer})]
    prompts = session.telling(count, length, n_tokens, newer, wrong)
    return session.requests(prompts, n_tokens, adapter=adapter)
