"""LIFE: old adapters go, what is loaded stays bounded, and unloading goes back to the start."""

from __future__ import annotations

from collections.abc import Sequence

from ..outcome import FailureError, about
from ..protocol import Capability, LoadedAdapter
from ..session import Session
from .sync import before_first_update

MANY = 20


async def old_gone(session: Session) -> str:
    """More updates than the bound has room for."""
    bound = session.subject.inventory_bound
    for _ in range(bound + 2):
        held = await _update_within_bound(session)
    return f"{held} loaded after {bound + 2} updates (allowed {bound})"


async def bounded(session: Session) -> str:
    """Many updates in a row; the last one serves."""
    most = max([await _update_within_bound(session) for _ in range(MANY)])
    told = await session.claim(True)
    return f"at most {most} loaded over {MANY} updates; {told}"


async def _update_within_bound(session: Session) -> int:
    adapter = await session.update()
    loaded, bound = await session.subject.loaded(), session.subject.inventory_bound
    if not loaded:
        raise FailureError(f"after version {adapter.version} the engine lists no adapter of this rollout's")
    if len(loaded) > bound:
        raise FailureError(
            f"old adapters stay loaded: {len(loaded)} after version {adapter.version} "
            f"(allowed {bound}): {_listed(loaded)}"
        )
    return len(loaded)


async def unloaded(session: Session) -> str:
    """Unload and send the same version again, twice over: a scale that is applied once too often grows."""
    adapter = await session.update()
    for _ in range(2):
        await session.subject.unload()
        with about("after unload_adapter"):
            if session.subject.has(Capability.INVENTORY) and (left := await session.subject.loaded()):
                raise FailureError(f"the engine still lists {_listed(left)}")
            before = await before_first_update(session)
        await session.serve(adapter)
        with about(f"version {adapter.version}, sent again after it was unloaded"):
            after = await session.claim(True)
    return f"unloaded, as before the first update: {before}; the same version again: {after}"


def _listed(loaded: Sequence[LoadedAdapter]) -> str:
    return ", ".join(f"{item.name!r} ({item.int_id})" for item in loaded)
