"""Faults in drawing tokens: those of a distribution other than the model's own at the temperature."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from vllm import SamplingParams

from rollproof.protocol import Completion, GenerateRequest
from rollproof_reference import AsyncRollout

from .case import bad


class IgnoresTheTemperature(AsyncRollout):
    """Samples at temperature 1 whatever was asked for."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, temperature=float(request.temperature > 0)))


class _Truncating:
    """An engine that adds its own defaults to what a request asks for."""

    def __init__(self, engine: Any, **defaults: Any) -> None:
        self._engine = engine
        self._defaults = defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, params: SamplingParams, *args: Any, **options: Any) -> AsyncIterator[Any]:
        for name, value in self._defaults.items():
            setattr(params, name, value)
        return self._engine.generate(prompt, params, *args, **options)


class TopKByDefault(AsyncRollout):
    """Samples from the twenty likeliest tokens, as the model's generation config says."""

    defaults: dict[str, Any] = {"top_k": 20}  # noqa: RUF012

    def __init__(self, engine: Any, *args: Any) -> None:
        super().__init__(_Truncating(engine, **self.defaults), *args)


class TopPByDefault(TopKByDefault):
    """Samples from the nucleus of 0.9, as the model's generation config says."""

    defaults: dict[str, Any] = {"top_p": 0.9}  # noqa: RUF012


class WiderTopPByDefault(TopKByDefault):
    """Samples from the nucleus of 0.95, as the model's generation config says."""

    defaults: dict[str, Any] = {"top_p": 0.95}  # noqa: RUF012


class ScoresAfterTemperature(AsyncRollout):
    """Reports the logprobs of the distribution after temperature, from which tokens are drawn."""


CASES = (
    bad(IgnoresTheTemperature, "SYNC-020", "at temperature 0.5: expected tokens sampled from"),
    bad(TopKByDefault, "SYNC-020", "at temperature 2: expected tokens sampled from"),
    bad(TopPByDefault, "SYNC-021", "expected tokens sampled from"),
    bad(WiderTopPByDefault, "SYNC-021", "beyond the likeliest"),
    bad(ScoresAfterTemperature, "SYNC-020", "no candidate's", engine={"logprobs_mode": "processed_logprobs"}),
)
