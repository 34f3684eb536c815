"""ID: adapter names and int ids are what the rollout declares."""

from __future__ import annotations

from ..outcome import FailureError
from ..protocol import LoadedAdapter
from ..session import Session

UPDATES = 5


async def stable(session: Session) -> str:
    """One pair through all updates."""
    seen: dict[tuple[str, int], int] = {}
    for _ in range(UPDATES):
        adapter = await session.update()
        for item in await _loaded(session):
            seen.setdefault((item.name, item.int_id), adapter.version)
        if len(seen) > 1:
            pairs = " and then ".join(
                f"name {name!r}, int id {int_id} (version {version})"
                for (name, int_id), version in seen.items()
            )
            raise FailureError(f"the rollout declares a stable id, and the engine holds {pairs}")
    ((name, int_id),) = seen
    return f"name {name!r} and int id {int_id} through {UPDATES} updates"


async def versioned(session: Session) -> str:
    """A new name and a new int id with each update."""
    names, int_ids = set[str](), set[int]()
    for _ in range(UPDATES):
        adapter = await session.update()
        fresh = [i for i in await _loaded(session) if i.name not in names and i.int_id not in int_ids]
        if not fresh:
            raise FailureError(
                f"the rollout declares versioned ids, and after version {adapter.version} the engine "
                f"holds no pair with both a new name and a new int id; used before: {sorted(names)}, "
                f"{sorted(int_ids)}"
            )
        names.update(item.name for item in fresh)
        int_ids.update(item.int_id for item in fresh)
    return f"a new pair with each of {UPDATES} updates"


async def _loaded(session: Session) -> list[LoadedAdapter]:
    loaded = await session.subject.loaded()
    if not loaded:
        raise FailureError("after an update the engine lists no adapter of this rollout's")
    return loaded
