"""SYNC, of how tokens are drawn: at the temperature that was asked for, from the whole distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..judge import ERROR_RATE, count_log_bound, surprise_log_bound
from ..oracle import Sample
from ..outcome import FailureError, UnderpoweredError, about
from ..protocol import GenerateRequest
from ..session import PROMPTS, Session

TEMPERATURES = (0.5, 2.0)

NUCLEUS = 0.95
"""Tokens beyond it are counted: the largest top-p in common use, so that one, and any smaller one, shows."""

_MANY = 8
"""Times as many prompts as another claim asks: what is counted is rare."""


async def temperature(session: Session) -> str:
    """Requests at temperatures other than 1, where a distribution and its tempered form differ."""
    adapter = await session.update()
    told = []
    for degree in TEMPERATURES:

        async def attempt(n_tokens: int, degree: float = degree) -> str:
            plain = session.requests(session.prompts(2 * PROMPTS), n_tokens)
            requests = [replace(request, temperature=degree) for request in plain]
            _control(session, adapter.version, requests)
            return session.verify(await session.ask(requests))

        with about(f"at temperature {degree:g}"):
            told.append(f"at temperature {degree:g} {await session.grow(attempt)}")
    return "; ".join(told)


async def whole(session: Session) -> str:
    """Many tokens at temperature 1: those beyond the nucleus have to come as often as they should."""
    adapter = await session.update()

    async def attempt(n_tokens: int) -> str:
        plain = session.requests(session.prompts(_MANY * PROMPTS), n_tokens)
        exchanges = await session.ask([replace(request, temperature=1.0) for request in plain])
        told = session.verify(exchanges)
        samples = [Sample(e.request.prompt_token_ids, e.completion.token_ids, 1.0) for e in exchanges]
        tails = session.oracle.tails(adapter.version, samples, NUCLEUS)
        chances, beyond = (torch.cat(parts) for parts in zip(*tails, strict=True))
        count, limit = int(beyond.sum()), math.log(ERROR_RATE)
        seen = (
            f"{count} of {len(beyond)} tokens lie beyond the likeliest that make {NUCLEUS:.0%}, and about "
            f"{float(chances.sum()):.0f} should"
        )
        if count_log_bound(chances, count) < limit:
            raise FailureError(f"tokens are not drawn from the whole distribution: {seen}")
        if count_log_bound(chances, 0) >= limit:
            raise UnderpoweredError(f"underpowered: {seen}, so that none at all could be chance")
        return f"{seen}; {told}"

    return await session.grow(attempt)


def _control(session: Session, version: int, requests: Sequence[GenerateRequest]) -> None:
    """Tokens that the oracle draws at temperature 1 for the same prompts have to be told apart."""
    first = requests[0]
    generator = torch.Generator().manual_seed(first.seed or 0)
    drawn = session.oracle.sample(
        version, [r.prompt_token_ids for r in requests], first.max_tokens, 1.0, generator
    )
    claimed = [replace(sample, temperature=first.temperature) for sample in drawn]
    bound = surprise_log_bound(session.oracle.score(version, claimed))
    if bound >= math.log(ERROR_RATE):
        raise UnderpoweredError(
            f"underpowered: {len(drawn)} completions drawn at temperature 1 could come from temperature "
            f"{first.temperature:g} by a chance of 1 in 10^{-bound / math.log(10):.0f}; use a model with "
            "more entropy"
        )
