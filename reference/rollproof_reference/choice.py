"""Which strategy suits whom, for ``sync=auto``. It knows what was measured, and no engine."""

from __future__ import annotations

FOLD_FROM = 400
"""Tokens of all requests between two updates from which on folding, which takes longer and generates faster,
is ahead of the arena. On one H200, with a 7B shape, rank 32 and 128 requests at once, a fold took 9.7 ms and
an arena update 1.7 ms; adapter requests gave 13.8 thousand tokens a second, folded weights 19.0 thousand: 406
(benchmarks/results/updates). Both the cost and the gain grow with the model, so it changes little with its
size."""


def choose(tokens_per_update: int | None) -> tuple[str, str]:
    """The strategy, and why: for so many tokens of all requests between two updates.

    Folding takes the base model and the adapter's id away, so it has to be asked for by saying how many.
    """
    if tokens_per_update is None:
        return "arena", (
            "it keeps base requests and the adapter's id; with tokens_per_update=N folding is weighed too"
        )
    if tokens_per_update < 1:
        raise ValueError(f"tokens_per_update is {tokens_per_update}: it has to be at least 1")
    if tokens_per_update < FOLD_FROM:
        return "arena", f"{tokens_per_update} tokens per update don't make up for folding ({FOLD_FROM} do)"
    return "fold", f"{tokens_per_update} tokens per update make up for folding ({FOLD_FROM} do)"
