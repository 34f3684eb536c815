"""BASE: requests without the adapter are the base model's."""

from __future__ import annotations

from ..session import Session


async def untouched(session: Session) -> str:
    """Base requests alone, with an adapter loaded."""
    await session.update()
    return await session.claim(False)


async def side_by_side(session: Session) -> str:
    """Base and adapter requests at once."""
    await session.update()
    return await session.claim(True, False)
