"""RANK: every rank that was promised is served exactly, and none above it silently wrong."""

from __future__ import annotations

from ..outcome import about
from ..protocol import Adapter
from ..scale import ANY
from ..session import Session
from ..subject import told as one_line


async def up_to_max(session: Session) -> str:
    """Odd, small and the highest rank."""
    most = session.subject.spec.max_lora_rank
    ranks = sorted({rank for rank in (1, 3, 8, most) if rank <= most})
    for rank in ranks:
        await session.update(rank=rank)
        with about(f"an adapter of rank {rank}"):
            told = await session.claim(True, scale=ANY)
    return f"ranks {', '.join(map(str, ranks))}; last: {told}"


async def patterns(session: Session) -> str:
    """Modules with ranks and alphas of their own."""
    leaves = sorted({name.rpartition(".")[2] for name in session.oracle.layers()})
    most = session.subject.spec.max_lora_rank
    adapter = session.adapter(
        rank=min(4, most),
        rank_pattern={leaves[0]: min(8, most), leaves[-1]: 1},
        alpha_pattern={leaves[1 % len(leaves)]: 3.0},
    )
    return await _exact_or_refused(session, adapter)


async def above_max(session: Session) -> str:
    """Ranks that were never promised."""
    most = session.subject.spec.max_lora_rank
    await session.update()
    told = [
        f"rank {rank} {await _exact_or_refused(session, session.adapter(rank=rank))}"
        for rank in (most + 1, 4 * most)
    ]
    return "; ".join(told)


async def _exact_or_refused(session: Session, adapter: Adapter) -> str:
    # The history knows whether the update was refused, and so which version has to answer.
    error = await session.push(adapter)
    how = "served" if error is None else f"refused ({one_line(error)}), the old version serves"
    return f"{how}: {await session.claim(True, scale=ANY)}"
