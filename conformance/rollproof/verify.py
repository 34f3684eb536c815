"""Verifying completions against a history: the oracle scores them, the judge decides, power is shown.

Works from the record alone, so that a history can be judged where no rollout runs any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from .candidates import BASE, Candidate, Mixed
from .flight import Answer, admitted
from .history import Exchange, History, Served
from .judge import POWER, Scored, Tolerance, Verdict, judge, rms
from .oracle import Oracle, Sample, Scores
from .outcome import FailureError, UnderpoweredError, Witness
from .protocol import Capability

RIVALS = 4
"""How many of the latest other versions a claim is set against, beside the base model. A failure is
matched against all of them."""


SIDE = 8
"""A mix is shown by a completion with so many tokens on either side of the update."""


class Tolerances(Protocol):
    """Where the tolerance for a size of completion comes from: prompt tokens, and completion tokens."""

    def tolerance(self, size: tuple[int, int]) -> Tolerance:
        """What is allowed for completions of this size."""
        ...


class Verifier:
    """The oracle, what it measured, and the history that says which version had to answer.

    ``in_flight`` is the policy for requests that an update overtakes.
    """

    def __init__(
        self, oracle: Oracle, calibration: Tolerances, history: History, in_flight: Capability | None
    ) -> None:
        self.oracle = oracle
        self.calibration = calibration
        self.history = history
        self.in_flight = in_flight
        self._own: dict[int, Callable[[tuple[int, int]], Tolerance]] = {}

    def learn(self, version: int, own: Callable[[tuple[int, int]], Tolerance]) -> None:
        """Allow a version that is in few modules its own noise too, as measured for a size of completion."""
        self._own[version] = own

    def judged(
        self, exchanges: Sequence[Exchange], wrong: Sequence[Candidate] = (), telling: int | None = None
    ) -> tuple[str, list[Scored]]:
        """Judge answers against every version that the history admits for each; say how well they fit.

        ``wrong`` are further candidates that must not be the answer. All answers have to be right, and
        ``telling`` of them (None: all) to tell it from wrong ones. With the words come the scores they
        stand on. Raises FailureError, or UnderpoweredError where the oracle can't tell right from wrong
        on these tokens.
        """
        verdict, scored, tolerance = self.weighed(exchanges, wrong)
        power = verdict.power(telling)
        told = f"the nearest wrong candidate is {power:.0f} tolerances away"
        if power < POWER:
            best = "" if telling is None else f"the best {telling} of "
            raise UnderpoweredError(
                f"underpowered: on {best}these {len(exchanges)} completions {told}, and a pass takes "
                f"{POWER:g}; use a model whose outputs an adapter moves more, or a dtype with less noise"
            )
        fit = f"within {verdict.distance:.2g} nats (allowed {tolerance.completion:.2g})"
        return f"{len(exchanges)} completions {fit}; {told}", scored

    def weighed(
        self, exchanges: Sequence[Exchange], wrong: Sequence[Candidate] = ()
    ) -> tuple[Verdict, list[Scored], Tolerance]:
        """As ``judged``, whatever the power. Raises FailureError."""
        tolerance = self.tolerance(exchanges)
        scored = self.scored(exchanges, tolerance, [BASE, *self._latest(), *wrong])
        verdict = judge(scored, tolerance)
        if verdict.failure:
            every = [*self.oracle.distinct, *wrong]
            verdict = judge(self.scored(exchanges, tolerance, every), tolerance)
            raise self._failure(exchanges, verdict)
        return verdict, scored, tolerance

    def _latest(self) -> list[int]:
        """The versions that a claim is set against. Of those in few modules, which may be next to the base
        model, only the newest two: the one that serves, and the one before it."""
        versions = self.oracle.distinct[1:]
        return [v for v in versions if v not in self._own or v in versions[-2:]][-RIVALS - 1 :]

    def _failure(self, exchanges: Sequence[Exchange], verdict: Verdict) -> FailureError:
        seen = [(exchanges[index], token) for index, token in verdict.witness]
        witness = [Witness(self.history.life, e.started, e.ended, token) for e, token in seen]
        at = ", ".join(str(item.started) for item in witness)
        if (token := witness[0].token) is not None:
            number = verdict.witness[0][0] + 1
            told = f"completion {number}, off for good from token {token} on, request {at} of the history"
        else:
            told = f"all tokens of {len(witness)} completions, request{'s' * (len(witness) > 1)} {at}"
        return FailureError(f"{verdict.failure}; witness: {told}", witness=witness)

    def shown(self, exchanges: Sequence[Exchange], scored: Sequence[Scored]) -> list[bool]:
        """Which completions could have shown another policy or adapter: an update overtook them."""
        later = [self._served(e).later for e in exchanges]
        if self.in_flight == Capability.FINISH_ON_OLD:
            return [bool(versions) for versions in later]
        if self.in_flight == Capability.RESTART:
            return [item.fitting in versions for item, versions in zip(scored, later, strict=True)]
        if self.in_flight != Capability.CONTINUE_MIXED:
            return [False] * len(exchanges)
        wrong = [self._wrong(item) if versions else [] for item, versions in zip(scored, later, strict=True)]
        samples = [replace(self.sample(e), temperature=0.0) for e in exchanges]
        scores = self._scores(samples, wrong)
        return [
            bool(mine) and min(_apart(item, found)) >= POWER * self.tolerance([e]).completion
            for e, item, mine, found in zip(exchanges, scored, wrong, scores, strict=True)
        ]

    def _wrong(self, item: Scored) -> list[Candidate]:
        """A mix as it would be with other versions at its end; none where that is too near to be seen."""
        fit = item.fitting
        if not isinstance(fit, Mixed) or not SIDE <= _switch(item, fit) <= len(item.tokens) - SIDE:
            return []
        *before, (version, first) = fit.parts
        others = [v for v in (BASE, *self.oracle.versions[-3:]) if v != version]
        return [Mixed((*before, (other, first)), fit.recomputed) for other in others]

    def tolerance(self, exchanges: Sequence[Exchange]) -> Tolerance:
        """What is allowed for completions of this size, measured once with the oracle alone."""
        size = self.size(exchanges)
        tolerance = self.calibration.tolerance(size)
        for served in map(self.history.served, exchanges):
            for version in (*served.at_start, *served.later):
                if version in self._own:
                    tolerance = tolerance.or_wider(self._own[version](size))
        return tolerance

    @staticmethod
    def size(exchanges: Sequence[Exchange]) -> tuple[int, int]:
        """The most prompt tokens and completion tokens that were asked for."""
        return (
            max(len(e.request.prompt_token_ids) for e in exchanges),
            max(e.request.max_tokens for e in exchanges),
        )

    @staticmethod
    def sample(e: Exchange) -> Sample:
        """A completion as the oracle takes it."""
        return Sample(e.request.prompt_token_ids, e.completion.token_ids, e.request.temperature)

    def scored(
        self, exchanges: Sequence[Exchange], tolerance: Tolerance, rivals: Sequence[Candidate]
    ) -> list[Scored]:
        """Each completion with what may have served it, and scores under that and all rivals."""
        self._check_tokens(exchanges)
        samples = [self.sample(e) for e in exchanges]
        answers = [
            Answer(
                sample,
                None if e.completion.logprobs is None else torch.tensor(e.completion.logprobs),
                self._served(e),
            )
            for e, sample in zip(exchanges, samples, strict=True)
        ]
        found = admitted(answers, self.in_flight, self.oracle, tolerance)
        scores = self._scores(samples, [[*rivals, *mine] for mine in found])
        return [
            Scored(a.sample.tokens, a.sample.temperature, a.observed, mine, by, len(a.sample.prompt))
            for a, mine, by in zip(answers, found, scores, strict=True)
        ]

    def _scores(
        self, samples: Sequence[Sample], wanted: Sequence[Sequence[Candidate]]
    ) -> list[dict[Candidate, Scores]]:
        """Each completion's scores under the candidates that are wanted for it.

        Most share theirs, and a batch costs little more than one.
        """
        scores: list[dict[Candidate, Scores]] = [{} for _ in samples]
        for candidate in dict.fromkeys(c for candidates in wanted for c in candidates):
            mine = [i for i, candidates in enumerate(wanted) if candidate in candidates]
            for i, score in zip(mine, self.oracle.score(candidate, [samples[i] for i in mine]), strict=True):
                scores[i][candidate] = score
        return scores

    def _served(self, exchange: Exchange) -> Served:
        """What may have served it; of versions with the same weights the first stands for all."""
        served, alike = self.history.served(exchange), self.oracle.alike
        return Served(tuple(map(alike, served.at_start)), tuple(map(alike, served.later)))

    def _check_tokens(self, exchanges: Sequence[Exchange]) -> None:
        for e in exchanges:
            outside = [t for t in e.completion.token_ids if not 0 <= t < self.oracle.vocab_size]
            if outside:
                raise FailureError(
                    f"token {outside[0]} came back; the vocabulary has {self.oracle.vocab_size} tokens"
                )


def _switch(item: Scored, mix: Mixed) -> int:
    """The token from which on a mix has its last version."""
    return mix.parts[-1][1] - item.prompt_tokens + 1


def _apart(item: Scored, others: Mapping[Candidate, Scores]) -> list[float]:
    """How far other mixes are from the one that fits, over its last version's tokens, in nats."""
    fit = item.fitting
    assert isinstance(fit, Mixed)
    tail = slice(_switch(item, fit), None)
    own = item.scores[fit].logprobs[tail]
    return [rms(other.logprobs[tail] - own).item() for other in others.values()]
