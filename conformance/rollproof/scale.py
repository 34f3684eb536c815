"""Whether an adapter has its right scale, by all tokens of a claim together.

A scale that is off by a few percent moves every logprob by less than the noise of a dtype with few
bits, so no token shows it. All of them do: they move along one direction, which the oracle knows, and
noise has none. An adapter whose modules have ranks or alphas of their own has several scales, and each
has its direction. Nothing here knows a rollout or a clause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .candidates import BASE
from .judge import MARGIN, Scored
from .oracle import Oracle, Sample
from .outcome import FailureError, UnderpoweredError

FAULT = 0.02
"""A relative error of the scale that has to be seen: that of dividing by r + 1 at a rank of 49, and any
wrong formula is further off at lower ranks."""

ANY = math.inf
"""No error has to be sure to show: what the noise lets be seen is claimed, and said."""

DEVIATIONS = 2 * MARGIN
"""A right rollout's scale may look off by so many standard deviations of what the oracle's own noise makes
of it. Noise over a whole claim is close to normal: by chance it is off by more with a probability of 1e-15,
and of 4e-9 in view of the 64 samples that the deviation is estimated from (Student's t of 32 degrees)."""

FLOOR = 1e-3
"""No less is allowed: float32 kernels differ in more than the oracle's own noise shows."""

_STEP = 0.01
"""The difference that stands for the derivative: its float32 noise is still 1e-5 of it."""


def directions(oracle: Oracle, version: int, samples: Sequence[Sample]) -> tuple[list[str], torch.Tensor]:
    """How each token's logprob grows with each of an adapter's scales: nats per relative change, [scales, T].

    T counts the tokens of all samples. With it come the names of the modules that have each scale.
    """
    from peft.tuners.lora import LoraLayer

    model = oracle.unmerged(version)
    sharing: dict[float, dict[str, LoraLayer]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            sharing.setdefault(module.scaling[model.active_adapter], {})[name] = module
    called, found = [], []
    for scale, modules in sharing.items():
        ends = []
        for factor in (1 + _STEP, 1 - _STEP):
            _rescale(model, modules.values(), factor * scale)
            ends.append(torch.cat(oracle.logprobs(model, samples)).double())
        _rescale(model, modules.values(), scale)
        called.append(", ".join(sorted({name.rpartition(".")[2] for name in modules})))
        found.append((ends[0] - ends[1]) / (2 * _STEP))
    return called, torch.stack(found)


def _rescale(model: Any, modules: Iterable[Any], scale: float) -> None:
    for module in modules:
        module.scaling[model.active_adapter] = scale


def relative_errors(along: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The changes of the scales that explain best how far the logprobs are off, and how sure they are.

    Least squares without a constant, from ``along`` [scales, T] and ``off`` [T] in nats. The second is
    each change's standard deviation for noise of one nat a token; not finite where no token shows one.
    """
    inverse, _ = torch.linalg.inv_ex(along.double() @ along.double().T)
    return inverse @ (along.double() @ off.double()), inverse.diagonal().sqrt()


def noise_along(oracle: Oracle, version: int, samples: Sequence[Sample]) -> float:
    """The noise of a token in nats, as far as it looks like an error of a scale, by the oracle alone.

    Completions of one length T; noise that the tokens of one share counts as such. Of an adapter's
    scales and of the two ways to compute (see ``Oracle.noise``) the noisiest counts.
    """
    along = directions(oracle, version, samples)[1]
    along = along.reshape(len(along), len(samples), -1)
    errors = torch.stack(oracle.noise(version, samples)).double()
    shared = torch.einsum("srt,rwt->srw", along, errors)  # [scales, samples, ways]
    variance = shared.pow(2).sum(1) / along.pow(2).sum((1, 2))[:, None]
    return float(variance.max().sqrt())


def claimed(
    oracle: Oracle,
    noise: Callable[[int], float],
    samples: Sequence[Sample],
    scored: Sequence[Scored],
    sure: float,
) -> str:
    """Claim every adapter's scale on completions that were judged token by token; say what it is.

    ``noise`` gives a version's noise along its scale. Completions that more than one version may have
    served say nothing here. Raises FailureError, or UnderpoweredError where a relative error of ``sure``
    might not show.
    """
    alone = [
        item.expected if len(item.admitted) == 1 and item.observed is not None else BASE for item in scored
    ]
    told = []
    for version in sorted({one for one in alone if isinstance(one, int)} - {BASE}):
        rows = [row for row, one in enumerate(alone) if one == version]
        off = [
            o - scored[row].scores[version].logprobs
            for row in rows
            if (o := scored[row].observed) is not None
        ]
        called, along = directions(oracle, version, [samples[row] for row in rows])
        errors, spread = relative_errors(along, torch.cat(off))
        deviations = (noise(version) * spread).tolist()
        for names, error, deviation in zip(called, errors.tolist(), deviations, strict=True):
            of = f" of {names}" if len(called) > 1 else ""
            told.append(judged(of, error, deviation, oracle.dtype, sure))
    return "; ".join(told) or "the scale is not claimed, since that takes logprobs of an adapter alone"


def allowance(dtype: torch.dtype, deviation: float) -> float:
    """The relative error to allow, given its standard deviation for a right rollout.

    A rollout that keeps the scale itself in its dtype is off by up to half of the dtype's epsilon.
    """
    return max(FLOOR, torch.finfo(dtype).eps, DEVIATIONS * deviation)


def judged(of: str, error: float, deviation: float, dtype: torch.dtype, sure: float) -> str:
    """A scale of so much error in words. Raises FailureError or UnderpoweredError."""
    if not math.isfinite(deviation):
        raise UnderpoweredError(f"underpowered: no token shows the scale{of}")
    allowed = allowance(dtype, deviation)
    bounds = f"(allowed {1 - allowed:.4f} to {1 + allowed:.4f})"
    if not abs(error) <= allowed:
        raise FailureError(
            f"the scale{of} that the logprobs show is {1 + error:.4f} of the adapter's {bounds}"
        )
    # A fault and the noise may point in opposite directions.
    if allowed + MARGIN * deviation > sure:
        raise UnderpoweredError(
            f"underpowered: the scale{of} is {1 + error:.4f} {bounds}, and one that is off by {sure:.0%} has "
            "to be sure to show; use a dtype with less noise, or a model whose outputs an adapter moves more"
        )
    return f"the scale{of} is {1 + error:.4f} {bounds}"
