"""Requests in flight during an update: which mix of versions computed each token.

The mix is found from the logprobs that came back and the oracle's replays; the rollout is not asked.
Nothing here knows a clause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .candidates import Candidate, Mixed
from .history import Served
from .judge import Tolerance, rms
from .oracle import Oracle, Sample
from .protocol import IN_FLIGHT, Capability

_WINDOW = 4
"""Tokens are explained where no so many in a row are off by twice what a completion may be: the noise of
a single token is too wide to tell versions apart in half precision."""

_BACK = 8
"""A version that agrees with its successor on some tokens by chance may have given way so many earlier."""

_BEAM = 3
"""So many mixes are followed further at a time."""

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
    # An update that still ran when the request began may have come in the middle of it.
    if len(whole) == 1 or declared is None:
        return whole
    if declared in (Capability.FINISH_ON_OLD, Capability.ABORT_IN_FLIGHT):
        return list(dict.fromkeys(served.at_start))
    if declared == Capability.RESTART or observed is None:
        return whole
    return [*whole, _Search(oracle, sample, observed, served, tolerance).best()]


@dataclass(frozen=True)
class _Fit:
    """A mix, how far each token is from it [T], and how many from the first on it explains."""

    mix: Mixed
    off: torch.Tensor
    explained: int

    @property
    def candidate(self) -> Candidate:
        return self.mix if len(self.mix.parts) > 1 else self.mix.parts[0][0]

    @property
    def rank(self) -> tuple[int, float]:
        return self.explained, -self.distance

    @property
    def distance(self) -> float:
        """Over the tokens that it explains."""
        return rms(self.off[: self.explained]).item() if self.explained else math.inf


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
        """The nearest of the mixes that explain all tokens, or else the one that explains the most."""
        whole = [self._fit(Mixed(((version, 0),))) for version in self._chain]
        found = list(whole)
        for recomputed in (False, True):
            if recomputed and any(self._tolerance.allows(fit.off) for fit in found):
                break  # a large model's search is long
            # One that waited for its turn may have begun with a version that came later, and a mix may
            # have gone on for some tokens before its KV was computed anew.
            beam = [*whole, *self._leading(found[len(whole) :])]
            while beam and not any(self._settled(fit, len(self._observed)) for fit in found):
                longer = [better for fit in beam for better in self._switched(fit, recomputed)]
                beam = self._leading(longer)
                found += beam
        return max(found, key=lambda fit: fit.rank).candidate

    @staticmethod
    def _leading(fits: list[_Fit]) -> list[_Fit]:
        return sorted(fits, key=lambda fit: fit.rank, reverse=True)[:_BEAM]

    def _fit(self, mix: Mixed) -> _Fit:
        off = (self._oracle.score(mix, [self._sample])[0].logprobs - self._observed).double()
        windows = rms(off.unfold(0, min(_WINDOW, len(off)), 1))
        wrong = (~(windows <= 2 * self._tolerance.completion)).nonzero()
        return _Fit(mix, off, int(wrong[0]) if len(wrong) else len(off))

    def _settled(self, fit: _Fit, n_tokens: int) -> bool:
        """Whether so many tokens are explained, and no worse than usual noise would have it."""
        usual = max(3 * self._tolerance.noise, self._tolerance.completion / 10)
        return fit.explained >= n_tokens and fit.distance <= usual

    def _switched(self, fit: _Fit, recomputed: bool) -> list[_Fit]:
        """Ways to go on with a later version that explain more; one that leaves no doubt stands alone.

        With ``recomputed`` also on KV computed anew, which the version that a mix has come to can do too.
        """
        better = []
        latest = self._chain.index(fit.mix.parts[-1][0])
        next_up = latest if recomputed and len(fit.mix.parts) > 1 else latest + 1
        for version in self._chain[next_up:]:
            for first in self._firsts(fit, recomputed):
                token = max(0, first - self._last_prompt)
                for mix in self._switches(fit.mix, version, first, recomputed):
                    found = self._fit(mix)
                    if found.explained <= fit.explained:
                        continue
                    if self._settled(found, min(token + _WINDOW, len(self._observed))):
                        return [found]
                    better.append(found)
            if fit.explained == 0 and not better and len(fit.mix.parts) == 1 and not recomputed:
                better += self._refined(fit, version)
        return better

    @staticmethod
    def _switches(mix: Mixed, version: int, first: int, recomputed: bool) -> Iterator[Mixed]:
        """A version from a position on: on the KV that is there, on KV computed anew, or first the one and
        so soon after it the other that no window lies between."""
        parts = (*mix.parts, (version, first))
        changes = version != mix.parts[-1][0]
        if changes:
            yield Mixed(parts, mix.recomputed)
        if recomputed:
            yield Mixed(parts, (*mix.recomputed, first))
        if recomputed and changes:
            for anew in range(first + 1, first + _WINDOW):
                yield Mixed((*parts, (version, anew)), (*mix.recomputed, anew))

    def _firsts(self, fit: _Fit, recomputed: bool) -> Iterator[int]:
        """Positions at which the next version may have taken over, the likeliest first."""
        since, end = fit.mix.parts[-1][1], self._last_prompt + len(self._observed)
        here = self._last_prompt + fit.explained  # the window that is off may begin before the switch
        latest, earliest = min(here + _WINDOW, end) - 1, max(since + 1, here - _BACK, self._last_prompt)
        yield from range(latest, earliest - 1, -1)
        if fit.explained == 0 and since == 0 and not recomputed:  # while the prompt was computed, in chunks
            yield from range(_BLOCK, self._last_prompt, _BLOCK)

    def _refined(self, fit: _Fit, version: int) -> list[_Fit]:
        """With a boundary inside the prompt, near the multiple of a block that comes nearest."""
        coarse = range(_BLOCK, self._last_prompt, _BLOCK)
        near = min(coarse, key=lambda first: self._apart(fit, version, first), default=1)
        around = range(max(1, near - _BLOCK + 1), min(self._last_prompt, near + _BLOCK))
        found = [self._fit(Mixed((*fit.mix.parts, (version, first)))) for first in around]
        return [fit for fit in found if fit.explained]

    def _apart(self, fit: _Fit, version: int, first: int) -> float:
        return rms(self._fit(Mixed((*fit.mix.parts, (version, first)))).off).item()
