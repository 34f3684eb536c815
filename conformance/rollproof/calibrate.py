"""How strong a run's adapters are and how far a right rollout may be off: measured by the oracle alone.

The rollout under test has no part in it, so a broken one can't widen its own tolerance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .candidates import BASE
from .judge import POWER, Tolerance, rms
from .models import make_adapter
from .oracle import Oracle, Sample
from .protocol import Adapter
from .scale import noise_along

STRENGTHS = (0.5, 1.0, 0.2)
"""Candidates for an adapter's change of each weight, in standard deviations of that weight."""

ENOUGH = 2 * POWER
"""The first strength this many tolerances apart is taken; where none is, the best."""

_ROWS = 8

LONGEST = 64
"""Noise on recorded prompts is measured over so many tokens at most."""

LETTERS = 16
"""A prompt has no more tokens that are different. Attention averages the values of a prompt, which cancel
over hundreds of unlike tokens; what stale ones change would too."""

_SCALE_ROWS = 16
"""Twice as many completions tell the noise along an adapter's scale, each computed in two ways."""

Size = tuple[int, int]
"""Prompt tokens, and completion tokens."""


class Calibration:
    """The strength of a run's adapters, and the tolerance for each size of completion.

    ``sizes`` are those that the strength has to do for.
    """

    def __init__(self, oracle: Oracle, seed: int, sizes: Sequence[Size]) -> None:
        self.oracle = oracle
        self._seed = seed
        self._measured: dict[tuple[float | str, Size], tuple[Tolerance, float]] = {}
        self._along: dict[tuple[str, Size], float] = {}
        powers: dict[float, float] = {}
        for strength in STRENGTHS:
            best, power = max(powers.values(), default=0.0), math.inf
            for size in sizes:
                power = min(power, self._power(strength, size))
                if power <= best:
                    break  # on the other sizes it could only be worse
            powers[strength] = power
            if power >= ENOUGH:
                break
        self.strength = max(powers, key=lambda strength: powers[strength])

    def tolerance(self, size: Size) -> Tolerance:
        """What is allowed for completions of this size; measured when first asked for."""
        return self._trial(self.strength, size)[0]

    def noise_along(self, version: int, size: Size) -> float:
        """The noise of a token along the scale of a version that the oracle knows (see ``scale``)."""
        key = self.oracle.digest(version), size
        if key not in self._along:
            generator = torch.Generator().manual_seed(self._seed)
            samples = _fresh(self.oracle, version, *size, generator, _SCALE_ROWS)
            self._along[key] = noise_along(self.oracle, version, samples)
        return self._along[key]

    def measure(self, adapter: Adapter, size: Size) -> tuple[Tolerance, float]:
        """An adapter's own tolerance, and its median distance from the base model in nats.

        Half of all prompts show more, and claims choose theirs among twice as many.
        """
        key = adapter.digest(), size
        if key not in self._measured:
            self._measured[key] = self._own(adapter, size)
        return self._measured[key]

    def _own(self, adapter: Adapter, size: Size) -> tuple[Tolerance, float]:
        generator = torch.Generator().manual_seed(self._seed)
        if new := adapter.version not in self.oracle.versions:
            self.oracle.add(adapter)
        samples = _fresh(self.oracle, adapter.version, *size, generator)
        tolerance = Tolerance.from_noise(self.oracle.noise(adapter.version, samples))
        effect = statistics.median(_apart(self.oracle, adapter.version, [BASE], samples))
        if new:
            self.oracle.forget(adapter.version)
        return tolerance, effect

    def _power(self, strength: float, size: Size) -> float:
        tolerance, effect = self._trial(strength, size)
        return effect / tolerance.completion

    def _trial(self, strength: float, size: Size) -> tuple[Tolerance, float]:
        if (strength, size) not in self._measured:
            self._measured[strength, size] = trial(self.oracle, strength, *size, self._seed)
        return self._measured[strength, size]


class Recorded:
    """Tolerances for completions of recorded prompts, by what the oracle itself makes of those.

    Of the ``prompts`` some are chosen by the seed: half of them the longest, whose noise is largest. The
    oracle completes them with up to ``longest`` tokens; the recorded tokens have no part in it.
    """

    def __init__(self, oracle: Oracle, prompts: Sequence[tuple[int, ...]], longest: int, seed: int) -> None:
        self._oracle = oracle
        self._longest = min(LONGEST, longest)
        self._seed = seed
        ordered = sorted(set(prompts), key=lambda prompt: (-len(prompt), prompt))
        top, rest = ordered[:_ROWS], ordered[_ROWS:]
        order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:_ROWS]
        both = [*top, *(rest[index] for index in order.tolist())]
        self._prompts = both[::2] + both[1::2]  # some of either in the half that is completed greedily
        self._noise: dict[str, list[torch.Tensor]] = {}

    def tolerance(self, versions: Mapping[int, str], n_tokens: int) -> Tolerance:
        """What is allowed where any of these versions, each with its digest, gave so many tokens or more."""
        errors = []
        for version, digest in versions.items():
            if digest not in self._noise:
                generator = torch.Generator().manual_seed(self._seed)
                samples = complete(self._oracle, version, self._prompts, self._longest, generator)
                self._noise[digest] = self._oracle.noise(version, samples)
            errors += self._noise[digest]
        size = min(n_tokens, self._longest)
        return Tolerance.from_noise([error.unfold(-1, size, size).reshape(-1, size) for error in errors])


def trial(oracle: Oracle, strength: float, length: int, n_tokens: int, seed: int) -> tuple[Tolerance, float]:
    """The tolerance, and the least distance in nats between two of {base, two trial adapters}.

    Each of the three completes prompts of its own, greedy and sampled; noise and distances are
    taken on those tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    first = max(oracle.versions) + 1
    trials = [BASE, first, first + 1]
    for version in trials[1:]:
        oracle.add(make_adapter(oracle.layers(), version, generator, strength=strength))
    errors: list[torch.Tensor] = []
    apart: list[float] = []
    for version in trials:
        samples = _fresh(oracle, version, length, n_tokens, generator)
        errors += oracle.noise(version, samples)
        apart += _apart(oracle, version, [v for v in trials if v != version], samples)
    for version in trials[1:]:
        oracle.forget(version)
    return Tolerance.from_noise(errors), min(apart)


def fresh_prompts(
    oracle: Oracle, count: int, length: int, generator: torch.Generator
) -> list[tuple[int, ...]]:
    """Random prompts of one length, each of ``LETTERS`` different tokens at most."""
    letters = torch.randint(0, oracle.vocab_size, (count, LETTERS), generator=generator)
    chosen = torch.randint(0, LETTERS, (count, length), generator=generator)
    return [tuple(row) for row in letters.gather(1, chosen).tolist()]


def _fresh(
    oracle: Oracle, version: int, length: int, n_tokens: int, generator: torch.Generator, rows: int = _ROWS
) -> list[Sample]:
    return complete(oracle, version, fresh_prompts(oracle, 2 * rows, length, generator), n_tokens, generator)


def complete(
    oracle: Oracle,
    version: int,
    prompts: Sequence[tuple[int, ...]],
    n_tokens: int,
    generator: torch.Generator,
) -> list[Sample]:
    """What a version itself makes of prompts: of the first half greedily, of the others sampled."""
    samples = []
    half = (len(prompts) + 1) // 2
    for length in dict.fromkeys(map(len, prompts)):  # one batch takes prompts of one length
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
        batch, heat = [prompts[row] for row in rows], tuple(float(row >= half) for row in rows)
        samples += oracle.sample(version, batch, n_tokens, heat, generator)
    return samples


def _apart(oracle: Oracle, one: int, others: Sequence[int], samples: list[Sample]) -> list[float]:
    """How far each other version is from one on each completion, in nats."""
    # Logprobs are all that is looked at, and those of greedy samples cost least.
    samples = [replace(sample, temperature=0.0) for sample in samples]
    own = oracle.score(one, samples)
    pairs = [pair for other in others for pair in zip(own, oracle.score(other, samples), strict=True)]
    return [rms(a.logprobs - b.logprobs).item() for a, b in pairs]
