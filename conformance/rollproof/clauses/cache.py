"""CACHE: no token is computed from KV that older weights left behind."""

from __future__ import annotations

from ..candidates import Mixed
from ..judge import rms
from ..outcome import FailureError, NotApplicableError
from ..session import LONG_PROMPT, MAX_TOKENS, Session

_BLOCK = 128
_CHOICE = 16


async def idle(session: Session) -> str:
    """One prompt, before and after an update, with nothing else running."""
    length = min(LONG_PROMPT, session.subject.spec.max_model_len - MAX_TOKENS)

    async def attempt(n_tokens: int) -> str:
        older = await session.update()
        newer = session.adapter()
        session.oracle.add(newer)
        prompt = _telling_prompt(session, length, n_tokens, older.version, newer.version)
        request = session.requests([prompt], n_tokens)[0]
        session.verify(await session.ask([request]))
        (again,) = await session.ask([request])
        hit = again.completion.num_cached_tokens
        if hit is None:
            raise FailureError("the rollout declares prefix-cache, and completions have no num_cached_tokens")
        if hit == 0:
            raise NotApplicableError(
                f"a prompt of {length} tokens asked twice reused no KV, so a fault can't show; "
                "turn prefix caching on to have this judged"
            )
        await session.serve(newer)
        stale = Mixed(((older.version, 0), (newer.version, min(hit, length - 1))))
        told = session.verify(await session.ask([request]), [stale])
        return f"{hit} of {length} prompt tokens came from the cache before the update; after it {told}"

    return await session.grow(attempt, length)


def _telling_prompt(session: Session, length: int, n_tokens: int, older: int, newer: int) -> tuple[int, ...]:
    """Of some fresh prompts the one that stale KV would move most, by the oracle alone."""
    oracle, kept = session.oracle, max(1, min(length // _BLOCK * _BLOCK, length - 1))
    samples = oracle.sample(newer, session.prompts(_CHOICE, length), n_tokens)
    fresh, stale = (
        oracle.score(candidate, samples) for candidate in (newer, Mixed(((older, 0), (newer, kept))))
    )
    apart = [rms(a.logprobs - b.logprobs).item() for a, b in zip(fresh, stale, strict=True)]
    return samples[apart.index(max(apart))].prompt
