"""What may have computed a completion: the base model, one adapter version, or several in turn.

Nothing here knows a model or a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

BASE = 0
"""The version number of the base model; adapters count from 1."""


@dataclass(frozen=True)
class Mixed:
    """Several versions in turn over the positions of a prompt and its completion.

    ``parts`` lists (version, first position it computed), ascending and from position 0. The token
    at index t after a prompt of n tokens is predicted at position n - 1 + t. Each version attends to
    the KV that those before it left. A part whose first position is in ``recomputed`` computed all KV
    before it anew instead, as an engine does after a preemption; its version may be that of the part
    before it.
    """

    parts: tuple[tuple[int, int], ...]
    recomputed: tuple[int, ...] = ()


Candidate = int | Mixed
"""A version that computed everything, or a mix."""


def on_stale_kv(older: int, newer: int, kept: int) -> Mixed:
    """The newer version on the KV that the older one left for the first ``kept`` prompt tokens."""
    return Mixed(((older, 0), (newer, kept)))


def name(candidate: Candidate, prompt_tokens: int = 0) -> str:
    """How a message calls a candidate, for a prompt of so many tokens."""
    if candidate == BASE:
        return "the base model"
    if not isinstance(candidate, Mixed):
        return f"version {candidate}"
    (version, _), *later = candidate.parts
    if len(later) == 1 and later[0][1] < prompt_tokens and not candidate.recomputed:
        newer, kept = later[0]
        return f"{name(newer)} on the stale KV of {name(version)} ({kept} prompt tokens)"
    told = name(version)
    for version, first in later:
        token = first - (prompt_tokens - 1)
        where = f"token {token}" if token >= 0 else f"prompt token {first}"
        anew = " with all KV computed anew" if first in candidate.recomputed else ""
        told += f", {name(version)} from {where} on{anew}"
    return told
