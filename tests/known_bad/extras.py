"""Faults in what a rollout offers beyond one completion at a time: routes, samples, scores, unloading."""

from __future__ import annotations

from dataclasses import replace

from rollproof.protocol import Completion, GenerateRequest
from rollproof_reference import AsyncRollout


class DropsItOnOneRoute(AsyncRollout):
    """Hands the adapter on where it waits for the whole, and forgets it where it streams (vllm-omni#5369)."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, adapter=request.adapter and request.route != "stream"))
