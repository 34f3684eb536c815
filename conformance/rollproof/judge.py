"""From what came back and what the oracle says of it to a verdict. Pure functions, no engine.

A completion's logprobs are compared with every candidate version's, so a verdict can say whose they
are. Its tokens are judged apart from its logprobs, since those may have been computed elsewhere:
greedy tokens have to be the likeliest, sampled ones must not surprise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from .candidates import Candidate, name
from .oracle import LAMBDAS, Scores

MARGIN = 4.0
"""A tolerance is this many times the largest noise that the oracle showed over n samples. If the noise
has tails no heavier than exponential, one sample exceeds it by chance with a probability of n^-4."""

FLOOR = 1e-4
"""nats. No tolerance is below it: float32 kernels differ in the order of sums and in how they
approximate exp, which the oracle's own noise does not show."""

POWER = 10.0
"""A pass is claimed only where the candidates are at least this many tolerances apart."""

ERROR_RATE = 1e-9
"""The probability that one test of sampled tokens fails a right rollout: 1e-6 over a thousand tests."""


@dataclass(frozen=True)
class Tolerance:
    """How far a right rollout may be from the oracle, in nats.

    ``completion`` bounds the root mean square over a completion's tokens, ``token`` each token.
    ``noise`` is the root mean square of the noise they come from, over ``samples`` tokens.
    """

    completion: float
    token: float
    noise: float
    samples: int

    @classmethod
    def from_noise(cls, errors: Sequence[torch.Tensor]) -> Tolerance:
        """From logprob errors, [rows, T] for each sequence."""
        flat = torch.cat([error.flatten() for error in errors])
        by_completion = torch.cat([rms(error) for error in errors])
        return cls(
            completion=max(FLOOR, MARGIN * by_completion.max().item()),
            token=max(FLOOR, MARGIN * flat.abs().max().item()),
            noise=rms(flat).item(),
            samples=flat.numel(),
        )

    def allows(self, off: torch.Tensor) -> bool:
        """Whether a completion's logprobs may be this far off, [T]."""
        return rms(off).item() <= self.completion and bool((off.abs() <= self.token).all())

    def or_wider(self, other: Tolerance) -> Tolerance:
        """What both allow."""
        return Tolerance(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Scored:
    """A completion with the oracle's scores of its T tokens under each candidate.

    ``admitted`` are the candidates that may have served it, the expected one last. ``observed`` [T]
    are the rollout's own logprobs, None if it gives none. ``prompt_tokens`` is the prompt's length.
    """

    tokens: tuple[int, ...]
    temperature: float
    observed: torch.Tensor | None
    admitted: Sequence[Candidate]
    scores: Mapping[Candidate, Scores]
    prompt_tokens: int = 0

    @property
    def expected(self) -> Candidate:
        """What a failure is told against."""
        return self.admitted[-1]

    @property
    def fitting(self) -> Candidate | None:
        """The admitted candidate that its logprobs are nearest to; None where they can't say."""
        if len(self.admitted) == 1:
            return self.expected
        if self.observed is None:
            return None
        return min(self.admitted, key=lambda candidate: _distance(self, candidate))

    def called(self, candidate: Candidate) -> str:
        """How a message calls a candidate."""
        return name(candidate, self.prompt_tokens)


@dataclass(frozen=True)
class Verdict:
    """``failure`` is empty for a pass. ``distance`` is the largest from the right version in nats, and
    ``powers`` say for each completion how many tolerances each wrong candidate is away. ``witness`` is the
    least that shows the failure: completions by index, and the token by which each can't match any more;
    None where it takes a completion's tokens together."""

    failure: str
    distance: float
    powers: tuple[Mapping[Candidate, float], ...]
    witness: tuple[tuple[int, int | None], ...] = ()

    def power(self, telling: int | None = None) -> float:
        """How many tolerances the nearest wrong candidate is away, at the least.

        With ``telling`` on the so many completions alone that tell right from wrong best.
        """
        each = sorted((min(p.values(), default=math.inf) for p in self.powers), reverse=True)
        return min(each[:telling], default=0.0)


def rms(values: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension."""
    return values.double().pow(2).mean(-1).sqrt()


def judge(scored: Sequence[Scored], tolerance: Tolerance) -> Verdict:
    """Judge the completions of one claim together."""
    failures, seen = [], list[tuple[int, int | None]]()
    for index, item in enumerate(scored):
        told = _logprob_failure(item, tolerance) or _greedy_failure(item, tolerance)
        if told:
            failures.append(f"completion {index + 1} of {len(scored)}: {told}")
            seen.append((index, _first_off(item, tolerance)))
    witness = [min(seen, key=lambda pair: pair[1] or 0)] if seen else []
    if not failures and (told := _surprise_failure(scored)):
        failures.append(told)
        witness = [(index, None) for index in _most_surprising(scored)]
    more = f" ({len(failures) - 1} more completions fail too)" if len(failures) > 1 else ""
    return Verdict(
        failure=failures[0] + more if failures else "",
        distance=max((_distance(i, i.fitting) for i in scored if i.fitting is not None), default=0.0),
        powers=tuple(_powers(item, tolerance) for item in scored),
        witness=tuple(witness),
    )


def _distance(item: Scored, version: Candidate) -> float:
    if item.observed is None:
        return 0.0
    return rms(item.observed - item.scores[version].logprobs).item()


def _powers(item: Scored, tolerance: Tolerance) -> dict[Candidate, float]:
    """How many tolerances each candidate that was not admitted is from the expected one, on these tokens."""
    expected = item.scores[item.expected].logprobs
    return {
        other: rms(expected - scores.logprobs).item() / tolerance.completion
        for other, scores in item.scores.items()
        if other not in item.admitted
    }


def _logprob_failure(item: Scored, tolerance: Tolerance) -> str:
    if item.observed is None:
        return ""
    if not bool(torch.isfinite(item.observed).all()):
        return f"its logprobs are not all finite: {item.observed.tolist()}"
    if any(tolerance.allows(item.observed - item.scores[version].logprobs) for version in item.admitted):
        return ""
    distances = {version: _distance(item, version) for version in item.scores}
    expected, nearest = item.expected, min(distances, key=lambda v: distances[v])
    wanted = f"expected {item.called(expected)}"
    if nearest != expected and distances[nearest] <= tolerance.completion:
        return (
            f"{wanted}; these logprobs are those of {item.called(nearest)}, {distances[nearest]:.2g} nats "
            f"from it and {distances[expected]:.2g} from {item.called(expected)} (allowed "
            f"{tolerance.completion:.2g})"
        )
    off = (item.observed - item.scores[expected].logprobs).abs()
    token = int(off.argmax())
    return (
        f"{wanted}; these logprobs are {distances[expected]:.2g} nats from it (allowed "
        f"{tolerance.completion:.2g}), at worst {off[token]:.2g} at token {token} (allowed "
        f"{tolerance.token:.2g}), and no candidate's: the nearest is {item.called(nearest)} at "
        f"{distances[nearest]:.2g}"
    )


def _greedy_failure(item: Scored, tolerance: Tolerance) -> str:
    if item.temperature != 0:
        return ""
    # Both sides of a comparison can be off by a token's tolerance.
    allowed = 2 * tolerance.token
    gaps = {version: s.top - s.logprobs for version, s in item.scores.items()}
    if any(bool((gaps[version] <= allowed).all()) for version in item.admitted):
        return ""
    gap = gaps[item.expected]
    token = int((gap > allowed).nonzero()[0])
    owner = next((v for v in gaps if bool((gaps[v] <= allowed).all())), None)
    whose = f"; greedy decoding of {item.called(owner)} gives these tokens" if owner is not None else ""
    return (
        f"expected greedy tokens of {item.called(item.expected)}; token {token} is {item.tokens[token]}, "
        f"{gap[token]:.2g} nats less likely than {int(item.scores[item.expected].top_ids[token])} "
        f"(allowed {allowed:.2g}){whose}"
    )


def _first_off(item: Scored, tolerance: Tolerance) -> int:
    """The first token by which a failing completion matches no admitted candidate, whatever follows it."""

    def first(wrong: torch.Tensor) -> int:
        found = wrong.nonzero()
        return int(found[0]) if len(found) else len(wrong)

    by_logprobs, by_tokens = [], []
    for candidate in item.admitted:
        scores = item.scores[candidate]
        by_tokens.append(first(scores.top - scores.logprobs > 2 * tolerance.token))
        if item.observed is not None:
            off = (item.observed - scores.logprobs).double()
            spent = (off.pow(2).cumsum(0) / len(off)).sqrt() > tolerance.completion
            by_logprobs.append(first(~off.isfinite() | (off.abs() > tolerance.token) | spent))
    ends = [max(by_logprobs)] if by_logprobs else []
    ends += [max(by_tokens)] if item.temperature == 0 else []
    return min(min(ends), len(item.tokens) - 1)


def _surprise_failure(scored: Sequence[Scored]) -> str:
    """Sampled tokens, all of a claim together, against the distribution they claim to come from."""
    items = [(scored[index], fit) for index, fit in _sampled(scored)]
    if not items:
        return ""
    bound = surprise_log_bound([item.scores[fit] for item, fit in items])
    if bound >= math.log(ERROR_RATE):
        return ""
    common = set.intersection(*(set(item.scores) for item, _ in items))
    others = {v: surprise_log_bound([item.scores[v] for item, _ in items]) for v in common}
    owner = max(others, key=lambda v: others[v], default=None)
    fits = owner is not None and others[owner] >= math.log(ERROR_RATE)
    whose = f"; they look sampled from {items[0][0].called(owner)}" if owner is not None and fits else ""
    expected = ", ".join(sorted({item.called(fit) for item, fit in items}))
    count = sum(len(item.tokens) for item, _ in items)
    return (
        f"expected tokens sampled from {expected}; the {count} sampled tokens are as unlikely as 1 in "
        f"10^{-bound / math.log(10):.0f} under it (allowed 1 in 10^{-math.log10(ERROR_RATE):.0f}){whose}"
    )


def _sampled(scored: Sequence[Scored]) -> list[tuple[int, Candidate]]:
    """The sampled completions by index, each with the candidate that its surprise is taken under."""
    fits = ((index, item.fitting) for index, item in enumerate(scored))
    return [(i, fit) for i, fit in fits if fit is not None and scored[i].scores[fit].surprise is not None]


def _most_surprising(scored: Sequence[Scored]) -> list[int]:
    """The fewest completions whose surprises alone are still beyond the bound.

    For each lambda these are the ones that add most to the exponent; the best lambda needs the fewest.
    """
    items = _sampled(scored)
    exponents = torch.stack(
        [_exponents([scored[index].scores[fit]]) for index, fit in items]
    )  # [completions, lambdas]
    added, order = exponents.sort(0)
    beyond = added.cumsum(0) + math.log(len(LAMBDAS)) < math.log(ERROR_RATE)
    counts = torch.where(beyond.any(0), beyond.double().argmax(0), len(items))
    best = int(counts.argmin())
    return sorted(items[row][0] for row in order[: int(counts[best]) + 1, best].tolist())


def surprise_log_bound(scores: Sequence[Scores]) -> float:
    """Log of a bound on the probability of sampled tokens at least this surprising, or this dull.

    The surprises of successive tokens are martingale differences, so Chernoff's bound holds for
    their sum x with the summed log moment generating functions: P(X >= x) <= exp(min over lambda of
    sum log_mgf(lambda) - lambda x), and the same below with negative lambda; the best of the
    LAMBDAS costs a factor of their number. No normal approximation, and never above log 1.
    """
    return min(0.0, math.log(len(LAMBDAS)) + float(_exponents(scores).min()))


def _exponents(scores: Sequence[Scores]) -> torch.Tensor:
    x = torch.cat([s.surprise for s in scores if s.surprise is not None]).double().sum()
    log_mgf = torch.cat([s.log_mgf for s in scores if s.log_mgf is not None]).double().sum(0)
    return log_mgf - LAMBDAS.double() * x


_COUNT_LAMBDAS = torch.tensor([-16.0, -4.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 4.0]).double()


def count_log_bound(chances: torch.Tensor, count: int) -> float:
    """Log of a bound on the probability of a count this low, or this high, of events with these chances.

    Chernoff's bound as above, for a sum of events that each have their chance given those before.
    """
    p = chances.double()[:, None]
    log_mgf = torch.log1p(p * torch.expm1(_COUNT_LAMBDAS)).sum(0)
    best = float((log_mgf - _COUNT_LAMBDAS * count).min())
    return min(0.0, math.log(len(_COUNT_LAMBDAS)) + best)
