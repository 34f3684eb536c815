"""Requests in flight during an update: which mix of versions computed each token.

The mix is found from the logprobs that came back and the oracle's replays; the rollout is not asked.
Nothing here knows a clause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .candidates import Candidate, Mixed
from .history import Served
from .judge import Tolerance, rms
from .oracle import Oracle, Sample
from .protocol import IN_FLIGHT, Capability

_BACK = 8
"""A version that agrees with its successor on some tokens by chance may have given way so many earlier."""

_BLOCK = 16
"""Boundaries inside a long prompt are looked for at multiples of this many tokens first."""


def policy(capabilities: frozenset[Capability]) -> Capability | None:
    """What becomes of requests in flight, as declared."""
    declared = [item for item in IN_FLIGHT if item in capabilities]
    return declared[0] if len(declared) == 1 else None


def admitted(
    served: Served,
    declared: Capability | None,
    oracle: Oracle,
    sample: Sample,
    observed: torch.Tensor | None,
    tolerance: Tolerance,
) -> list[Candidate]:
    """The candidates that the declared policy admits for one completion, the expected one last.

    Under continue-mixed, the last is the mix that explains the logprobs best.
    """
    whole: list[Candidate] = list(dict.fromkeys([*served.at_start, *served.later]))
    if not served.later or declared is None:
        return whole
    if declared in (Capability.FINISH_ON_OLD, Capability.ABORT_IN_FLIGHT):
        return list(dict.fromkeys(served.at_start))
    if declared == Capability.RESTART or observed is None:
        return whole
    return [*whole, _Search(oracle, sample, observed, served, tolerance).best()]


@dataclass(frozen=True)
class _Fit:
    """A mix, the number of tokens from the first on that it explains, and its distance over all."""

    mix: Mixed
    explained: int
    distance: float

    @property
    def rank(self) -> tuple[int, float]:
        return self.explained, -self.distance

    @property
    def candidate(self) -> Candidate:
        return self.mix if len(self.mix.parts) > 1 else self.mix.parts[0][0]


class _Search:
    """Looks for the mix, one switch after the other: each where the version before it stops fitting."""

    def __init__(
        self, oracle: Oracle, sample: Sample, observed: torch.Tensor, served: Served, tolerance: Tolerance
    ) -> None:
        self._oracle = oracle
        # Logprobs are all that is looked at, and those of greedy samples cost least.
        self._sample = replace(sample, temperature=0.0)
        self._observed = observed
        self._served = served
        self._tolerance = tolerance
        self._chain = [*served.at_start, *served.later]
        self._last_prompt = len(sample.prompt) - 1

    def best(self) -> Candidate:
        """The mix that explains the most tokens; of those the nearest."""
        whole = [self._fit(Mixed(((version, 0),))) for version in self._chain]
        best = max(whole, key=lambda fit: fit.rank)
        for index in range(len(self._served.at_start)):
            for recomputed in (False, True):
                if best.explained < len(self._observed):
                    grown = self._grown(whole[index], index, recomputed)
                    best = max(best, grown, key=lambda fit: fit.rank)
        return best.candidate

    def _fit(self, mix: Mixed) -> _Fit:
        off = self._oracle.score(mix, [self._sample])[0].logprobs - self._observed
        wrong = (~(off.abs() <= self._tolerance.token)).nonzero()
        return _Fit(mix, int(wrong[0]) if len(wrong) else len(off), rms(off).item())

    def _grown(self, fit: _Fit, index: int, recomputed: bool) -> _Fit:
        while fit.explained < len(self._observed):
            options = [
                self._fit(Mixed((*fit.mix.parts, (version, first)), recomputed))
                for version in self._chain[index + 1 :]
                for first in self._firsts(fit, recomputed)
            ]
            better = max(options, key=lambda fit: fit.rank, default=fit)
            if fit.explained == better.explained == 0 and options and not recomputed:
                better = self._refined(better)
            if better.explained <= fit.explained:
                return fit
            fit, index = better, self._chain.index(better.mix.parts[-1][0])
        return fit

    def _firsts(self, fit: _Fit, recomputed: bool) -> Iterator[int]:
        """Positions at which the next version may have taken over, the likeliest first."""
        here, since = self._last_prompt + fit.explained, fit.mix.parts[-1][1]
        yield from range(here, max(since, here - _BACK - 1, self._last_prompt - 1), -1)
        if fit.explained == 0 and not recomputed:  # while the prompt was computed, in chunks
            step = 1 if self._last_prompt <= 4 * _BLOCK else _BLOCK
            yield from range(step, self._last_prompt, step)

    def _refined(self, fit: _Fit) -> _Fit:
        *parts, (version, first) = fit.mix.parts
        around = range(max(1, first - _BLOCK + 1), min(self._last_prompt, first + _BLOCK))
        mixes = [Mixed((*parts, (version, other))) for other in around]
        return max(map(self._fit, mixes), key=lambda fit: fit.rank, default=fit)
