"""FLIGHT: requests that an update overtakes end as the rollout declares, and none is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ..flight import policy
from ..history import Exchange
from ..outcome import FailureError, NotApplicableError, RaisedError, UnderpoweredError
from ..protocol import IN_FLIGHT, Adapter, Capability, GenerateRequest
from ..session import PROMPT_TOKENS, PROMPTS, Session

TOKENS = 64
LONGEST = 256
"""What a first attempt asks for at most."""

ATTEMPTS = 6
UPDATES = 3
BESIDE = 4
"""At most so many requests start while an update runs, however long it takes."""


async def declared(session: Session) -> str:
    """One update in the middle of eight completions."""
    what = policy(session.subject.capabilities)
    if what is None:
        raise NotApplicableError(f"the rollout declares not exactly one of {', '.join(IN_FLIGHT)}")
    n_tokens, delay = await _lengths(session)
    for _ in range(ATTEMPTS):
        adapter = session.adapter()
        requests = session.requests(session.prompts(), n_tokens)
        answered, raised = await _overtaken(session, requests, delay, adapter, what)
        told, scored = session.verifier.judged(answered) if answered else ("", [])
        shown = raised if what == Capability.ABORT_IN_FLIGHT else 0
        shown += sum(session.verifier.shown(answered, scored))
        if shown:
            return f"{what}: {shown} of {len(requests)} requests in flight show it; {told}"
        if answered and not any(session.subject.history.served(e).later for e in answered):
            delay /= 2  # all had ended before the update began
        n_tokens = min(2 * n_tokens, session.subject.spec.max_model_len - PROMPT_TOKENS)
    raise UnderpoweredError(
        f"underpowered: in {ATTEMPTS} attempts no request of up to {n_tokens} tokens was caught in flight in "
        f"a way that shows {what}"
    )


async def _lengths(session: Session) -> tuple[int, float]:
    """How many tokens to ask for, and after how many seconds to update, so that an update has an effect in
    the middle: a large model's may take longer than ``TOKENS`` do."""
    adapter = session.adapter()
    session.oracle.add(adapter)
    began = time.monotonic()
    await session.serve(adapter, known=True)
    updating = time.monotonic() - began
    asking = await _seconds(session, TOKENS)
    n_tokens, delay = TOKENS, asking / 3
    while n_tokens < LONGEST and delay + updating > 0.75 * asking * n_tokens / TOKENS:
        n_tokens *= 2
    return min(n_tokens, session.subject.spec.max_model_len - PROMPT_TOKENS), delay


async def none_lost(session: Session) -> str:
    """Requests that start before, during and after each of several updates, base requests among them."""
    await session.update()
    delay = await _seconds(session, TOKENS) / 4
    tasks: list[asyncio.Task[Exchange]] = []
    with_base = (True, False) if session.subject.has(Capability.BASE) else (True,)

    def start(count: int) -> None:
        for one in with_base:
            some = count if one else 1
            for request in session.requests(session.prompts(some), TOKENS, adapter=one):
                tasks.append(asyncio.ensure_future(session.subject.generate(request)))

    try:
        for _ in range(UPDATES):
            start(2)
            await asyncio.sleep(delay)
            update = asyncio.ensure_future(session.update())
            for _ in range(BESIDE):
                if not update.done():
                    start(1)
                    await asyncio.wait([update], timeout=delay / 4)
            await update
        start(1)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    answered, raised = _sorted(answers, policy(session.subject.capabilities))
    in_flight = sum(bool(session.subject.history.served(e).later) for e in answered)
    if not in_flight and not raised:
        raise UnderpoweredError("underpowered: every request ended before the update after it began")
    told = session.verify(answered)
    return f"{len(tasks)} requests over {UPDATES} updates, {in_flight + raised} of them overtaken: {told}"


async def cancelled(session: Session) -> str:
    """Half of the requests in flight are cancelled while an update runs."""
    what = policy(session.subject.capabilities)
    await session.update()
    delay = await _seconds(session, TOKENS) / 3
    requests = session.requests(session.prompts(2 * PROMPTS), TOKENS)
    tasks = [asyncio.ensure_future(session.subject.generate(request)) for request in requests]
    try:
        await asyncio.sleep(delay)
        update = asyncio.ensure_future(session.update())
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await update
        ended = await asyncio.gather(*tasks[::2], return_exceptions=True)
        kept = await asyncio.gather(*tasks[1::2], return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    cancelled = sum(isinstance(end, asyncio.CancelledError) for end in ended)
    if not cancelled:
        raise UnderpoweredError("underpowered: every request had ended before it was cancelled")
    answered, _ = _sorted(kept, what)
    told = session.verify(answered) if answered else "the others were aborted by the update"
    return (
        f"{cancelled} cancelled beside an update; the others: {told}; after it: {await session.claim(True)}"
    )


async def _seconds(session: Session, n_tokens: int) -> float:
    """How long a batch of completions takes with nothing beside it."""
    await session.ask(session.requests(session.prompts(), n_tokens))  # the first may meet a cold engine
    began = time.monotonic()
    await session.ask(session.requests(session.prompts(), n_tokens))
    return time.monotonic() - began


async def _overtaken(
    session: Session, requests: Sequence[GenerateRequest], delay: float, adapter: Adapter, what: Capability
) -> tuple[list[Exchange], int]:
    """Ask, update after ``delay`` seconds, and await the answers: those that came, how many raised."""
    session.oracle.add(adapter)  # before they run, since with a large model it takes as long as some tokens
    tasks = [asyncio.ensure_future(session.subject.generate(request)) for request in requests]
    try:
        await asyncio.sleep(delay)
        await session.serve(adapter, known=True)
        return _sorted(await asyncio.gather(*tasks, return_exceptions=True), what)
    finally:
        for task in tasks:
            task.cancel()


def _sorted(
    answers: Sequence[Exchange | BaseException], what: Capability | None
) -> tuple[list[Exchange], int]:
    """The answers with tokens, and how many came to none, where the policy allows that."""
    answered, raised = [], 0
    for index, answer in enumerate(answers):
        if isinstance(answer, Exchange):
            if answer.completion.token_ids:
                answered.append(answer)
            raised += answer.completion.finish_reason == "abort"
        elif isinstance(answer, RaisedError) and what == Capability.ABORT_IN_FLIGHT:
            raised += 1
        elif isinstance(answer, FailureError):
            raise FailureError(
                f"request {index + 1} of {len(answers)}, beside an update: {answer}", fatal=True
            )
        else:
            raise answer
    return answered, raised
