"""The engine's ``max_lora_rank`` for the highest adapter rank that has to fit.

vLLM sizes its LoRA buffers by one of a few values and refuses any other, so a rank is rounded up.
This module knows no engine but asks for the list of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import LoraConfig


class RankError(ValueError):
    """A LoRA rank that can't be served. The message names the bounds."""


def highest_rank(config: LoraConfig) -> int:
    """The highest rank that any module of this adapter has, ``rank_pattern`` included."""
    ranks = {"r": config.r}
    ranks |= {f"rank_pattern[{key!r}]": rank for key, rank in (config.rank_pattern or {}).items()}
    return max(checked_rank(rank, name) for name, rank in ranks.items())


def max_lora_rank(rank: int | LoraConfig, allowed: Sequence[int] | None = None) -> int:
    """The smallest value the engine allows that is at least ``rank``.

    ``rank`` is a number or a PEFT config, whose ``rank_pattern`` counts. ``allowed`` defaults to
    the values of the installed vLLM. Raises RankError for a rank that is not a whole number of at
    least 1, or is above the largest allowed value.
    """
    if allowed is None:
        from .engine import allowed_ranks

        allowed = allowed_ranks()
    wanted = checked_rank(rank, "rank") if isinstance(rank, int | float | str) else highest_rank(rank)
    fitting = [value for value in sorted(allowed) if value >= wanted]
    if not fitting:
        raise RankError(
            f"rank {wanted} is above {max(allowed)}, the largest that vLLM serves; "
            f"allowed for max_lora_rank: {', '.join(map(str, sorted(allowed)))}. "
            f"Train with a rank of at most {max(allowed)}, or merge the adapter."
        )
    return fitting[0]


def checked_rank(rank: object, name: str) -> int:
    """``rank`` if it is a whole number of at least 1; ``name`` is for the error."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise RankError(f"{name} is {rank!r}, a {type(rank).__name__}: it has to be a whole number")
    if rank < 1:
        raise RankError(f"{name} is {rank}: it has to be at least 1")
    return rank
