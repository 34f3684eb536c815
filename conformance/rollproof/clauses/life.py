"""LIFE: old adapters go, what is loaded stays bounded, memory too, and unloading goes back to the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..memory import device_bytes, host_bytes, slope
from ..outcome import FailureError, UnderpoweredError, about
from ..protocol import Adapter, Capability, LoadedAdapter
from ..session import Session
from ..subject import told as one_line
from .sync import before_first_update

MANY = 20
READINGS = 180
"""After a warm-up of ``MANY`` updates, in which buffers grow to their size."""

LEAK = 0.2
"""Growth an update, in adapters, from which on memory isn't flat."""


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


async def flat(session: Session) -> str:
    """Memory after each of many updates with the largest adapter, and how many adapters are listed."""
    # Two sets of tensors in turn, and an oracle that learns the last alone: the kit's own memory may be
    # part of what is read.
    rank = session.subject.spec.max_lora_rank
    first = session.adapter(rank=rank)
    turns = [first, session.adapter(rank=rank)]
    host, device, listed = list[int](), list[int](), list[int]()
    for index in range(MANY + READINGS):
        adapter = replace(turns[index % 2], version=first.version + index)
        if (error := await session.offer(adapter)) is not None:
            raise FailureError(f"update_adapter refused version {adapter.version}: {one_line(error)}")
        if index < MANY:
            continue
        host.append(_host_bytes(await session.subject.process_ids()))
        if (used := device_bytes()) is not None:
            device.append(used)
        if session.subject.has(Capability.INVENTORY):
            listed.append(len(await session.subject.loaded()))
    if listed and max(listed) > listed[0]:
        raise FailureError(f"{listed[0]} adapters were listed at first, and {max(listed)} later on")
    own = _bytes(adapter, session.subject.spec.dtype)
    told = [_flat("host", host, own), *([_flat("device", device, own)] if device else [])]
    session.oracle.add(adapter)
    return f"{', '.join(told)}; then {await session.claim(True)}"


def _flat(what: str, readings: Sequence[int], own: int) -> str:
    found = slope(readings)
    told = (
        f"{what} memory grows by {found.middle / own:.3f} of an adapter's {own} bytes an update "
        f"({found.low / own:.3f} to {found.high / own:.3f}, allowed {LEAK:g})"
    )
    if found.low > LEAK * own:
        raise FailureError(told)
    if found.high > LEAK * own:
        raise UnderpoweredError(f"underpowered: {told}; stop what else uses it, or take a larger model")
    return told


def _host_bytes(process_ids: Sequence[int]) -> int:
    try:
        return host_bytes(process_ids)
    except ProcessLookupError as error:
        raise FailureError(f"process_ids named {list(process_ids)}: {error}") from error


def _bytes(adapter: Adapter, dtype: str) -> int:
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    return size * sum(tensor.numel() for tensor in adapter.tensors.values())


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
