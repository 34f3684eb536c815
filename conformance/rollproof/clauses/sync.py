"""SYNC: the newest adapter is the one that is sampled."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..outcome import FailureError, RaisedError, about
from ..protocol import Capability
from ..session import MAX_TOKENS, Session

UPDATES = 5
RESUMED = 1000
SAMPLES = 4


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


async def resumed(session: Session) -> str:
    """A high version first, as after a checkpoint, and the next."""
    told = []
    for version in (RESUMED, RESUMED + 1):
        await session.serve(replace(session.adapter(), version=version))
        with about(f"with version {version} the rollout's {'first' if version == RESUMED else 'second'}"):
            told.append(await session.claim(True))
    return f"version {RESUMED} first: {told[0]}; then {RESUMED + 1}: {told[1]}"


async def unchanged(session: Session) -> str:
    """The tensors of the version before, an adapter that is the base model, and one that is neither."""
    adapter = await session.update()
    await session.serve(replace(session.adapter(), tensors=adapter.tensors, config=adapter.config))
    with about("a new version with the tensors of the one before"):
        same = await session.claim(True)
    fresh = session.adapter()
    zero = {name: t.zero_() if ".lora_B." in name else t for name, t in fresh.tensors.items()}
    await session.serve(replace(fresh, tensors=zero))
    with about("an adapter whose every B is zero, which is the base model"):
        inert = await session.claim(True)
    await session.update()
    with about("an update after one that changed nothing"):
        after = await session.claim(True)
    return f"the same tensors: {same}; B of zero: {inert}; an update after it: {after}"


async def several_samples(session: Session) -> str:
    """A few prompts with several samples each, after two updates; each sample is judged for itself."""
    for _ in range(2):
        await session.update()

    async def attempt(n_tokens: int) -> str:
        for request in session.requests(session.prompts(SAMPLES), n_tokens):
            exchanges = await session.subject.generate_n(replace(request, temperature=1.0), SAMPLES)
            with about(f"of the {SAMPLES} samples of one prompt"):
                told = session.verify(exchanges)
            if len({e.completion.token_ids for e in exchanges}) == 1:
                raise FailureError(
                    f"the {SAMPLES} samples of one prompt, at temperature 1, have the same "
                    f"{len(exchanges[0].completion.token_ids)} tokens: they are not drawn independently"
                )
        return f"{SAMPLES} samples of each of {SAMPLES} prompts; last: {told}"

    return await session.grow(attempt)


async def _claim_on(session: Session, route: str, adapter: bool) -> str:
    async def attempt(n_tokens: int) -> str:
        requests = session.requests(session.prompts(), n_tokens, adapter=adapter)
        return session.verify(await session.ask([replace(request, route=route) for request in requests]))

    return await session.grow(attempt)
