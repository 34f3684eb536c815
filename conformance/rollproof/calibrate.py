"""How strong a run's adapters are and how far a right rollout may be off: measured by the oracle alone.

The rollout under test has no part in it, so a broken one can't widen its own tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .judge import POWER, Tolerance, rms
from .models import make_adapter
from .oracle import BASE, Oracle

STRENGTHS = (0.5, 1.0, 0.2)
"""Candidates for an adapter's change of each weight, in standard deviations of that weight."""

ENOUGH = 2 * POWER
"""The first strength this many tolerances apart is taken; where none is, the best."""

_ROWS = 8


Size = tuple[int, int]
"""Prompt tokens, and completion tokens."""


class Calibration:
    """The strength of a run's adapters, and the tolerance for each size of completion.

    ``sizes`` are those that the strength has to do for.
    """

    def __init__(self, oracle: Oracle, seed: int, sizes: Sequence[Size]) -> None:
        self._oracle = oracle
        self._seed = seed
        self._measured: dict[tuple[float, Size], tuple[Tolerance, float]] = {}
        powers: dict[float, float] = {}
        for strength in STRENGTHS:
            powers[strength] = min(self._power(strength, size) for size in sizes)
            if powers[strength] >= ENOUGH:
                break
        self.strength = max(powers, key=lambda strength: powers[strength])

    def tolerance(self, size: Size) -> Tolerance:
        """What is allowed for completions of this size; measured when first asked for."""
        return self._trial(self.strength, size)[0]

    def _power(self, strength: float, size: Size) -> float:
        tolerance, effect = self._trial(strength, size)
        return effect / tolerance.completion

    def _trial(self, strength: float, size: Size) -> tuple[Tolerance, float]:
        if (strength, size) not in self._measured:
            self._measured[strength, size] = trial(self._oracle, strength, *size, self._seed)
        return self._measured[strength, size]


def trial(oracle: Oracle, strength: float, length: int, n_tokens: int, seed: int) -> tuple[Tolerance, float]:
    """The tolerance, and the least distance in nats between two of {base, two trial adapters}.

    Each of the three completes prompts of its own, greedy and sampled; noise and distances are
    taken on those tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, oracle.vocab_size, (2 * _ROWS, length), generator=generator)
    prompts = [tuple(row) for row in ids.tolist()]
    first = max(oracle.versions) + 1
    trials = [BASE, first, first + 1]
    for version in trials[1:]:
        oracle.add(make_adapter(oracle.layers(), version, generator, strength=strength))
    errors: list[torch.Tensor] = []
    apart: list[float] = []
    for version in trials:
        samples = [
            *oracle.sample(version, prompts[:_ROWS], n_tokens, 0.0, generator),
            *oracle.sample(version, prompts[_ROWS:], n_tokens, 1.0, generator),
        ]
        errors += oracle.noise(version, samples)
        own = oracle.score(version, samples)
        for other in (v for v in trials if v != version):
            theirs = oracle.score(other, samples)
            apart += [rms(a.logprobs - b.logprobs).item() for a, b in zip(own, theirs, strict=True)]
    for version in trials[1:]:
        oracle.forget(version)
    return Tolerance.from_noise(errors), min(apart)
