"""Whether an adapter has its right scale, by all tokens of a claim together.

A scale that is off by a few percent moves every logprob by less than the noise of a dtype with few
bits, so no token shows it. All of them do: they move along one direction, which the oracle knows, and
noise has none. Nothing here knows a rollout or a clause, and what is allowed is measured elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from .judge import MARGIN, Scored
from .oracle import Oracle, Sample
from .outcome import FailureError, UnderpoweredError
from .protocol import Adapter

FAULT = 0.02
"""A relative error of the scale that has to be seen: that of dividing by r + 1 at a rank of 49, and any
wrong formula is further off at lower ranks."""

FLOOR = 1e-3
"""No less is allowed: float32 kernels differ in more than the oracle's own noise shows."""

_STEP = 0.01
"""The difference that stands for the derivative: its float32 noise is still 1e-5 of it."""


def direction(oracle: Oracle, adapter: Adapter, samples: Sequence[Sample]) -> torch.Tensor:
    """How much each token's logprob grows with the adapter's scale, in nats per relative change."""
    version, found = max(oracle.versions) + 1, []
    for factor in (1 + _STEP, 1 - _STEP):
        oracle.add(rescaled(adapter, version, factor))
        found.append(torch.cat([score.logprobs for score in oracle.score(version, samples)]))
        oracle.forget(version)
    return (found[0] - found[1]).double() / (2 * _STEP)


def rescaled(adapter: Adapter, version: int, factor: float) -> Adapter:
    """The adapter as another version, with every scale times ``factor`` and the same tensors."""
    config = copy.deepcopy(adapter.config)
    config.lora_alpha *= factor
    config.alpha_pattern = {name: alpha * factor for name, alpha in (config.alpha_pattern or {}).items()}
    return replace(adapter, version=version, config=config)


def relative_error(along: torch.Tensor, off: torch.Tensor) -> float:
    """The change of the scale that explains best how far the logprobs are off: least squares, no constant."""
    return float((along.double() * off.double()).sum() / along.double().pow(2).sum())


def allowance(dtype: torch.dtype, noise: Sequence[float]) -> float:
    """The relative error to allow, from those that the oracle's own noise in this dtype looks like.

    A rollout that keeps the scale itself in its dtype is off by up to half of the dtype's epsilon.
    """
    return max(FLOOR, torch.finfo(dtype).eps, MARGIN * max(map(abs, noise)))


def claim(
    oracle: Oracle, adapter: Adapter, samples: Sequence[Sample], scored: Sequence[Scored], allowed: float
) -> str:
    """Claim an adapter's scale on completions that were judged token by token; say what it is.

    Raises FailureError, or UnderpoweredError where noise may look like so much that an error of
    ``FAULT`` isn't sure to show.
    """
    off = [
        item.observed - item.scores[item.expected].logprobs for item in scored if item.observed is not None
    ]
    if len(off) < len(scored):
        return "the scale is not claimed, since that takes logprobs"
    return told(relative_error(direction(oracle, adapter, samples), torch.cat(off)), allowed)


def told(error: float, allowed: float) -> str:
    """A scale of so much error in words. Raises FailureError or UnderpoweredError."""
    bounds = f"(allowed {1 - allowed:.4f} to {1 + allowed:.4f})"
    if not abs(error) <= allowed:
        raise FailureError(f"the scale that the logprobs show is {1 + error:.4f} of the adapter's {bounds}")
    # A fault and the largest noise that was seen may point in opposite directions.
    if allowed * (1 + 1 / MARGIN) > FAULT:
        raise UnderpoweredError(
            f"underpowered: the scale is {1 + error:.4f} {bounds}, and one that is off by {FAULT:.0%} has to "
            "be sure to show; use a dtype with less noise, or a model whose outputs an adapter moves more"
        )
    return f"the scale is {1 + error:.4f} {bounds}"
