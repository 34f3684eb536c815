"""Sync straight from memory: the tensors travel to the worker as one safetensors blob, no file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from safetensors.torch import save

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from ..check import PlainAdapter

# vLLM wants a path on every LoRA request, and reads it only when the id isn't loaded. The worker
# removes and adds in one call, so a request never meets that moment.
_NO_FOLDER = "/nonexistent/rollproof-in-memory"


class TensorSync:
    """Sends each adapter through ``collective_rpc``: plain bytes, so vLLM's own serialisation is enough."""

    name = "tensors"

    async def push(self, engine: AsyncLLM, name: str, int_id: int, adapter: PlainAdapter) -> str:
        """Serialise the tensors and swap them in on every worker."""
        blob = await asyncio.to_thread(save, adapter.tensors)
        await engine.collective_rpc("rollproof_swap", args=(int_id, adapter.config, blob))
        return _NO_FOLDER

    def close(self) -> None:
        """Nothing is held outside the engine."""
