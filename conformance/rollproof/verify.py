"""Verifying completions against a history: the oracle scores them, the judge decides, power is shown.

Works from the record alone, so that a history can be judged where no rollout runs any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .candidates import BASE, Candidate, Mixed
from .flight import admitted
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
        self._own: dict[int, Tolerance] = {}

    def learn(self, version: int, own: Tolerance) -> None:
        """Allow a version the noise that was measured for it alone."""
        self._own[version] = own

    def verify(self, exchanges: Sequence[Exchange], wrong: Sequence[Candidate] = ()) -> str:
        """Judge answers against every version that the history admits for each; say how well they fit.

        ``wrong`` are further candidates that must not be the answer. Raises FailureError, or
        UnderpoweredError where the oracle can't tell right from wrong on these tokens.
        """
        return self.judged(exchanges, wrong)[0]

    def judged(
        self, exchanges: Sequence[Exchange], wrong: Sequence[Candidate] = ()
    ) -> tuple[str, list[Scored]]:
        """As ``verify``, and the scores it came from."""
        verdict, scored, tolerance = self.weighed(exchanges, wrong)
        told = f"the nearest wrong candidate is {verdict.power:.0f} tolerances away"
        if verdict.power < POWER:
            raise UnderpoweredError(
                f"underpowered: on these {len(exchanges)} completions {told}, and a pass takes {POWER:g}; "
                "use a model whose outputs an adapter moves more, or a dtype with less noise"
            )
        fit = f"within {verdict.distance:.2g} nats (allowed {tolerance.completion:.2g})"
        return f"{len(exchanges)} completions {fit}; {told}", scored

    def weighed(
        self, exchanges: Sequence[Exchange], wrong: Sequence[Candidate] = ()
    ) -> tuple[Verdict, list[Scored], Tolerance]:
        """As ``judged``, whatever the power. Raises FailureError."""
        tolerance = self.tolerance(exchanges)
        latest = self.oracle.distinct[1:][-RIVALS - 1 :]
        scored = self.scored(exchanges, tolerance, [BASE, *latest, *wrong])
        verdict = judge(scored, tolerance)
        if verdict.failure:
            every = [*self.oracle.distinct, *wrong]
            verdict = judge(self.scored(exchanges, tolerance, every), tolerance)
            raise self._failure(exchanges, verdict)
        return verdict, scored, tolerance

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

    def shows(self, e: Exchange, item: Scored) -> bool:
        """Whether a completion that an update overtook could have shown another policy or adapter."""
        fit, later = item.fitting, self._served(e).later
        if not later or self.in_flight in (None, Capability.ABORT_IN_FLIGHT):
            return False
        if self.in_flight == Capability.FINISH_ON_OLD:
            return True
        if self.in_flight == Capability.RESTART:
            return fit in later
        if not isinstance(fit, Mixed):
            return False
        *before, (version, first) = fit.parts
        token = first - len(e.request.prompt_token_ids) + 1
        if not SIDE <= token <= len(item.tokens) - SIDE:
            return False
        others = [v for v in (BASE, *self.oracle.versions[-3:]) if v != version]
        sample, tail = self.sample(e), item.scores[fit].logprobs[token:]
        apart = []
        for other in others:
            wrong = Mixed((*before, (other, first)), fit.recomputed)
            apart.append(rms(self.oracle.score(wrong, [sample])[0].logprobs[token:] - tail).item())
        return min(apart) >= POWER * self.tolerance([e]).completion

    def tolerance(self, exchanges: Sequence[Exchange]) -> Tolerance:
        """What is allowed for completions of this size, measured once with the oracle alone."""
        length = max(len(e.request.prompt_token_ids) for e in exchanges)
        n_tokens = max(e.request.max_tokens for e in exchanges)
        tolerance = self.calibration.tolerance((length, n_tokens))
        for served in map(self.history.served, exchanges):
            for version in (*served.at_start, *served.later):
                tolerance = tolerance.or_wider(self._own.get(version, tolerance))
        return tolerance

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
        items = []
        for e, sample in zip(exchanges, samples, strict=True):
            observed = None if e.completion.logprobs is None else torch.tensor(e.completion.logprobs)
            served = self._served(e)
            found = admitted(served, self.in_flight, self.oracle, sample, observed, tolerance)
            items.append((sample, observed, found))
        # Most share their candidates, and a batch costs little more than one.
        scores: list[dict[Candidate, Scores]] = [{} for _ in items]
        for candidate in dict.fromkeys([*rivals, *(c for _, _, found in items for c in found)]):
            mine = [i for i, (_, _, found) in enumerate(items) if candidate in (*rivals, *found)]
            for i, score in zip(mine, self.oracle.score(candidate, [samples[i] for i in mine]), strict=True):
                scores[i][candidate] = score
        return [
            Scored(sample.tokens, sample.temperature, observed, found, scores[i], len(sample.prompt))
            for i, (sample, observed, found) in enumerate(items)
        ]

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
