"""LIFE: old adapters go, and what is loaded stays bounded."""

from __future__ import annotations

from ..outcome import FailureError
from ..session import Session

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
        held = ", ".join(f"{item.name!r} ({item.int_id})" for item in loaded)
        raise FailureError(
            f"old adapters stay loaded: {len(loaded)} after version {adapter.version} "
            f"(allowed {bound}): {held}"
        )
    return len(loaded)
