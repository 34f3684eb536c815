"""What a clause is written with: the next adapter, fresh prompts, asking, and verifying the answers.

A session joins one rollout under test with the oracle. It knows no clause.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch

from .calibrate import ENOUGH, Calibration, fresh_prompts
from .candidates import BASE, Candidate
from .flight import policy
from .history import Exchange
from .judge import rms
from .models import make_adapter
from .oracle import Oracle
from .outcome import FailureError, UnderpoweredError
from .protocol import Adapter, GenerateRequest
from .scale import claimed
from .subject import Subject, told
from .verify import Verifier

PROMPT_TOKENS = 24
PROMPTS = 8
LONG_PROMPT = 400
"""Prompt tokens for clauses about KV: at least three blocks of 128, the largest in common use."""

MAX_TOKENS = 16
_CHOICE = 32
"""So many prompts, or twice as many as are asked if that is more, are there to choose from."""

_LOUDEST = 1.5
"""The most for experts, in standard deviations of their weights. What a louder one adds can decide which
experts later layers choose; rounding flips that at times, and then a right rollout is further off than any
noise that was measured."""

GROWTH = 4
"""Completions grow up to this many times ``MAX_TOKENS`` before a claim ends as underpowered."""

SIZES = ((PROMPT_TOKENS, MAX_TOKENS), (LONG_PROMPT, MAX_TOKENS))
"""The sizes of completion that every run asks for."""


class Session:
    """A rollout under test, the oracle, and a source of prompts and adapters."""

    def __init__(self, subject: Subject, oracle: Oracle, calibration: Calibration) -> None:
        self.subject = subject
        self.oracle = oracle
        self.verifier = Verifier(oracle, calibration, subject.history, policy(subject.capabilities))
        self.updated = False
        self.calibration = calibration
        self._generator = torch.Generator()

    def reseed(self, seed: int, text: str) -> None:
        """Draw from here on what this seed and text give, whatever was drawn before."""
        digest = hashlib.sha256(f"{seed}:{text}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:7], "big"))

    def adapter(self, weights: Mapping[str, torch.Tensor] | None = None, **options: Any) -> Adapter:
        """A new adapter of the next version, unlike all before (options: see ``make_adapter``).

        It is on ``weights``, which are all linear layers unless given.
        """
        version = self._next()
        options.setdefault("rank", min(8, self.subject.spec.max_lora_rank))
        options.setdefault("strength", self.calibration.strength)
        layers = self.oracle.layers() if weights is None else weights
        return make_adapter(layers, version, self._generator, **options)

    def _next(self) -> int:
        """A version above all that were made, and above those that were sent past the oracle."""
        sent = [update.version for update in self.subject.history.updates if update.error is None]
        return max(*self.oracle.versions, *sent, 0) + 1

    def strong_adapter(self, **options: Any) -> Adapter:
        """An adapter that lives in few modules, made strong enough to stand out of the noise.

        Its own noise is measured too, since a strong change can amplify it.
        """
        return self._strong(lambda strength: self.adapter(strength=strength, **options))

    def expert_adapter(self, expert: int) -> Adapter:
        """An adapter on one expert of every layer, in the form that PEFT gives it, strong enough to be seen.

        PEFT keeps all experts' halves in one tensor (``target_parameters``): A is [experts * rank, in],
        one expert after another; B is [out, rank * experts], the experts side by side. The others' B is
        zero.
        """
        weights = self.oracle.experts()
        count = next(iter(weights.values())).shape[0]
        targets = sorted({".".join(name.split(".")[-2:]) for name in weights})
        rank = min(8, self.subject.spec.max_lora_rank)
        config, state = self.oracle.peft_state(
            r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=targets
        )

        def make(strength: float) -> Adapter:
            tensors = {}
            for name, tensor in state.items():
                noise = torch.randn(tensor.shape, generator=self._generator)
                if ".lora_B." in name:
                    own = torch.arange(tensor.shape[1]) % count == expert
                    tensors[name] = noise * own * (strength / (2 * rank**0.5))
                else:
                    tensors[name] = noise / tensor.shape[1] ** 0.5
            return Adapter(self._next(), config, tensors)

        return self._strong(make, _LOUDEST)

    def _strong(self, make: Callable[[float], Adapter], most: float = math.inf) -> Adapter:
        """The first that is strong enough, or the best: noise grows with the strength too."""
        best = -1.0
        for strength in sorted({min(factor * self.calibration.strength, most) for factor in (1, 2, 4, 8)}):
            adapter = make(strength)
            own, effect = self.calibration.measure(adapter, SIZES[0])
            power = effect / own.or_wider(self.calibration.tolerance(SIZES[0])).completion
            if power > best:
                best, chosen = power, adapter
            if power >= ENOUGH:
                break
        self._learn(chosen)
        return chosen

    def peft_adapter(self, **options: Any) -> Adapter:
        """An adapter as PEFT itself makes it for a config, with random weights: for other than A and B.

        Its own noise is measured too.
        """
        version = self._next()
        options.setdefault(
            "target_modules", sorted({name.rpartition(".")[2] for name in self.oracle.layers()})
        )
        config, state = self.oracle.peft_state(r=8, lora_alpha=16, **options)
        tensors = {}
        for name, tensor in state.items():
            noise = torch.randn(tensor.shape, generator=self._generator)
            fresh = ".lora_A." in name or ".lora_B." in name
            tensors[name] = noise / tensor.shape[-1] ** 0.5 if fresh else tensor * (1 + 0.3 * noise)
        adapter = Adapter(version, config, tensors)
        self._learn(adapter)
        return adapter

    def _learn(self, adapter: Adapter) -> None:
        self.verifier.learn(adapter.version, lambda size: self.calibration.measure(adapter, size)[0])

    async def offer(self, adapter: Adapter) -> Exception | None:
        """Send an adapter past the oracle: one that has to be refused, one of many, or one it was told of."""
        self.updated = True
        return await self.subject.update(adapter)

    async def push(self, adapter: Adapter) -> Exception | None:
        """Send an adapter; return what the rollout raised if it refused."""
        self.updated = True
        self.oracle.add(adapter)
        return await self.subject.update(adapter)

    async def update(self, **options: Any) -> Adapter:
        """Make the next version and have the rollout serve it (see ``serve``)."""
        return await self.serve(self.adapter(**options))

    async def serve(self, adapter: Adapter, *, known: bool = False) -> Adapter:
        """Have the rollout serve an adapter, which the oracle may know. Raises FailureError if it refuses."""
        if (error := await (self.offer if known else self.push)(adapter)) is not None:
            raise FailureError(f"update_adapter refused version {adapter.version}: {told(error)}")
        return adapter

    def prompts(self, count: int = PROMPTS, length: int = PROMPT_TOKENS) -> list[tuple[int, ...]]:
        """Fresh random prompts, so that no earlier request left KV for them."""
        return fresh_prompts(self.oracle, count, length, self._generator)

    def telling(
        self, count: int, length: int, n_tokens: int, right: int, wrong: Sequence[Candidate]
    ) -> list[tuple[int, ...]]:
        """Of fresh prompts those whose completions tell a version best from all of ``wrong``.

        The oracle alone chooses, by what it would answer itself.
        """
        prompts = self.prompts(max(_CHOICE, 2 * count), length)
        samples = self.oracle.sample(right, prompts, n_tokens)
        scores, *others = [self.oracle.score(candidate, samples) for candidate in (right, *wrong)]
        apart = [
            [rms(a.logprobs - b.logprobs).item() for a, b in zip(scores, o, strict=True)] for o in others
        ]
        least = [min(row) for row in zip(*apart, strict=True)]
        best = sorted(range(len(prompts)), key=lambda row: least[row], reverse=True)
        return [prompts[row] for row in best[:count]]

    def requests(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, *, adapter: bool = True
    ) -> list[GenerateRequest]:
        """One request a prompt: every other one greedy, the rest sampled at temperature 1."""
        seeds = torch.randint(0, 2**31, (len(prompts),), generator=self._generator).tolist()
        return [
            GenerateRequest(prompt, max_tokens, temperature=index % 2, seed=seed, adapter=adapter)
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]

    async def ask(self, requests: Sequence[GenerateRequest]) -> list[Exchange]:
        """All requests at once."""
        tasks = [asyncio.ensure_future(self.subject.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def claim(self, *adapter: bool, scale: float | None = None) -> str:
        """Ask fresh prompts, and verify every answer; say in numbers how well they fit.

        ``claim(True)`` asks with the adapter, ``claim(False)`` the base model, ``claim(True, False)``
        both side by side; ``scale`` is as for ``verify``. Where any prompts don't tell enough, such are
        chosen as do. Raises FailureError or UnderpoweredError.
        """
        first = True

        async def attempt(n_tokens: int) -> str:
            nonlocal first
            chosen, first = not first, False
            asked = []
            for one in adapter:
                prompts = self._prompts_for(n_tokens, one) if chosen else self.prompts()
                asked.append(self.requests(prompts, n_tokens, adapter=one))
            mixed = [one for group in zip(*asked, strict=True) for one in group]
            return self.verify(await self.ask(mixed), scale=scale)

        return await self.grow(attempt)

    def _prompts_for(self, n_tokens: int, adapter: bool) -> list[tuple[int, ...]]:
        """Prompts that tell the version that serves from the base model, where there is such a version."""
        served = [update.version for update in self.subject.history.updates if update.error is None]
        if not served or served[-1] not in self.oracle.versions:
            return self.prompts()
        right, wrong = (served[-1], BASE) if adapter else (BASE, served[-1])
        return self.telling(PROMPTS, PROMPT_TOKENS, n_tokens, right, [wrong])

    async def grow(self, attempt: Callable[[int], Awaitable[str]], prompt_tokens: int = PROMPT_TOKENS) -> str:
        """Attempt a claim with completions of ``MAX_TOKENS``, and longer ones while it is underpowered."""
        longest = min(MAX_TOKENS * GROWTH, self.subject.spec.max_model_len - prompt_tokens)
        n_tokens = MAX_TOKENS
        while True:
            try:
                return await attempt(n_tokens)
            except UnderpoweredError:
                n_tokens *= 2
                if n_tokens > longest:
                    raise

    def verify(
        self,
        exchanges: Sequence[Exchange],
        wrong: Sequence[Candidate] = (),
        *,
        telling: int | None = None,
        scale: float | None = None,
    ) -> str:
        """Judge answers against every version that the history admits for each (see ``Verifier.judged``).

        Where ``scale`` is given, also by the scale that all tokens show together: a relative error of
        so much has to be sure to show (``ANY``: whatever the noise lets be seen).
        """
        told, scored = self.verifier.judged(exchanges, wrong, telling)
        if scale is None:
            return told
        size = self.verifier.size(exchanges)
        samples = [self.verifier.sample(e) for e in exchanges]

        def noise(version: int) -> float:
            return self.calibration.noise_along(version, size)

        return f"{told}; {claimed(self.oracle, noise, samples, scored, scale)}"
