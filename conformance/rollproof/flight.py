"""Requests in flight during an update: which mix of versions computed each token.

The mix is found from the logprobs that came back and the oracle's replays; the rollout is not asked.
Nothing here knows a clause.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

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


@dataclass(frozen=True)
class Answer:
    """A completion, the logprobs that came with it [T] (None if none did), and what may have served it."""

    sample: Sample
    observed: torch.Tensor | None
    served: Served


def admitted(
    answers: Sequence[Answer], declared: Capability | None, oracle: Oracle, tolerance: Tolerance
) -> list[list[Candidate]]:
    """The candidates that the declared policy admits for each completion, the expected one last.

    Under continue-mixed, the last is the mix that explains the logprobs best.
    """
    found = [_whole(answer.served, declared) for answer in answers]
    if declared == Capability.CONTINUE_MIXED:
        overtaken = [
            i for i, answer in enumerate(answers) if answer.observed is not None and len(found[i]) > 1
        ]
        searches = [_Search(answers[i], tolerance) for i in overtaken]
        for i, mix in zip(overtaken, _together(oracle, searches), strict=True):
            found[i].append(mix)
    return found


def _whole(served: Served, declared: Capability | None) -> list[Candidate]:
    """The versions that may have computed a completion alone."""
    whole: list[Candidate] = list(dict.fromkeys([*served.at_start, *served.later]))
    if declared in (Capability.FINISH_ON_OLD, Capability.ABORT_IN_FLIGHT):
        # An update that still ran when the request began may have come in the middle of it.
        return list(dict.fromkeys(served.at_start))
    return whole


def _together(oracle: Oracle, searches: Sequence[_Search]) -> list[Candidate]:
    """What each search finds. A mix is replayed for all that wait for it at once.

    Requests in flight mostly change versions in the same step, and so do their searches.
    """
    running = [search.best() for search in searches]
    wanted = {index: next(steps) for index, steps in enumerate(running)}
    found: dict[int, Candidate] = {}
    while wanted:
        mix = min(wanted.values(), key=_turn)
        mine = [index for index, other in wanted.items() if other == mix]
        scores = oracle.score(mix, [searches[index].sample for index in mine])
        for index, score in zip(mine, scores, strict=True):
            try:
                wanted[index] = running[index].send(score.logprobs)
            except StopIteration as end:
                found[index] = end.value
                del wanted[index]
    return [found[index] for index in range(len(searches))]


def _turn(mix: Mixed) -> tuple[int, int, list[tuple[int, int]]]:
    """In which order mixes are replayed: as a search goes, so that one can wait for those behind it."""
    return len(mix.recomputed), len(mix.parts), [(version, -first) for version, first in mix.parts]


@dataclass(frozen=True)
class _Fit:
    """A mix, how far each token is from it [T], and how many from the first on it explains.

    ``allowed``: a right rollout may be this far off.
    """

    mix: Mixed
    off: torch.Tensor
    explained: int
    allowed: bool

    @property
    def candidate(self) -> Candidate:
        return self.mix if len(self.mix.parts) > 1 else self.mix.parts[0][0]

    @property
    def rank(self) -> tuple[bool, int, float]:
        return self.allowed, self.explained, -self.distance

    @property
    def distance(self) -> float:
        """Over the tokens that it explains."""
        return rms(self.off[: self.explained]).item() if self.explained else math.inf


_Found = TypeVar("_Found")
_Steps = Generator[Mixed, torch.Tensor, _Found]
"""A part of a search: it yields mixes, and is sent the logprobs [T] that the oracle has for each."""


class _Search:
    """Looks for the mix, one switch after the other: each where the version before it stops fitting."""

    def __init__(self, answer: Answer, tolerance: Tolerance) -> None:
        assert answer.observed is not None
        # Logprobs are all that is looked at, and those of greedy samples cost least.
        self.sample = replace(answer.sample, temperature=0.0)
        self._observed = answer.observed
        self._tolerance = tolerance
        self._chain = [*answer.served.at_start, *answer.served.later]
        self._last_prompt = len(self.sample.prompt) - 1

    def best(self) -> _Steps[Candidate]:
        """The nearest of the mixes that explain all tokens, or else the one that explains the most."""
        whole = []
        for version in self._chain:
            whole.append((yield from self._fit(Mixed(((version, 0),)))))
        found = list(whole)
        for recomputed in (False, True):
            if recomputed and any(fit.allowed for fit in found):
                break  # a large model's search is long
            # One that waited for its turn may have begun with a version that came later, and a mix may
            # have gone on for some tokens before its KV was computed anew.
            beam = [*whole, *self._leading(found[len(whole) :])]
            while beam and not any(self._settled(fit, len(self._observed)) for fit in found):
                longer = []
                for fit in beam:
                    longer += yield from self._switched(fit, recomputed)
                beam = self._leading(longer)
                found += beam
        return max(found, key=lambda fit: fit.rank).candidate

    @staticmethod
    def _leading(fits: list[_Fit]) -> list[_Fit]:
        return sorted(fits, key=lambda fit: fit.rank, reverse=True)[:_BEAM]

    def _fit(self, mix: Mixed) -> _Steps[_Fit]:
        logprobs = yield mix
        off = (logprobs - self._observed).double()
        windows = rms(off.unfold(0, min(_WINDOW, len(off)), 1))
        wrong = (~(windows <= 2 * self._tolerance.completion)).nonzero()
        explained = int(wrong[0]) if len(wrong) else len(off)
        return _Fit(mix, off, explained, self._tolerance.allows(off))

    def _settled(self, fit: _Fit, n_tokens: int) -> bool:
        """Whether so many tokens are explained, and no worse than usual noise would have it."""
        usual = max(3 * self._tolerance.noise, self._tolerance.completion / 10)
        return fit.explained >= n_tokens and fit.distance <= usual

    def _switched(self, fit: _Fit, recomputed: bool) -> _Steps[list[_Fit]]:
        """Ways to go on with a later version that explain more; one that leaves no doubt stands alone.

        With ``recomputed`` also on KV computed anew, which the version that a mix has come to can do too.
        """
        better: list[_Fit] = []
        if fit.explained == len(self._observed):
            return better
        latest = self._chain.index(fit.mix.parts[-1][0])
        next_up = latest if recomputed and len(fit.mix.parts) > 1 else latest + 1
        for version in self._chain[next_up:]:
            nearest = math.inf  # of those that are allowed
            for first in self._firsts(fit, recomputed):
                token, here = max(0, first - self._last_prompt), math.inf
                for mix in self._switches(fit.mix, version, first, recomputed):
                    found = yield from self._fit(mix)
                    here = min(here, found.distance)
                    if found.explained <= fit.explained:
                        continue
                    if self._settled(found, min(token + _WINDOW, len(self._observed))):
                        return [found]
                    better.append(found)
                    if found.allowed:
                        nearest = min(nearest, found.distance)
                if here > nearest:
                    break  # it was passed by
            if fit.explained == 0 and not better and len(fit.mix.parts) == 1 and not recomputed:
                better += yield from self._refined(fit, version)
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

    def _refined(self, fit: _Fit, version: int) -> _Steps[list[_Fit]]:
        """With a boundary inside the prompt, near the multiple of a block that comes nearest."""
        apart: dict[int, float] = {}
        for first in range(_BLOCK, self._last_prompt, _BLOCK):
            coarse = yield from self._fit(Mixed((*fit.mix.parts, (version, first))))
            apart[first] = rms(coarse.off).item()
        near = min(apart, key=lambda first: apart[first], default=1)
        found = []
        for first in range(max(1, near - _BLOCK + 1), min(self._last_prompt, near + _BLOCK)):
            found.append((yield from self._fit(Mixed((*fit.mix.parts, (version, first))))))
        return [fit for fit in found if fit.explained]
