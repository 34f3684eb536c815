"""Sync straight from memory: the tensors travel to the worker as one safetensors blob, no file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from safetensors.torch import save

from ..plain import plain_adapter

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import Adapter

    from ..check import Layout
    from ..plain import PlainAdapter

# vLLM wants a path on every LoRA request, and reads it only when the id isn't loaded. The worker
# removes and adds in one call, so a request never meets that moment.
IN_MEMORY = "/nonexistent/rollproof-in-memory"


class TensorSync:
    """Sends each adapter through ``collective_rpc``: plain bytes, so vLLM's own serialisation is enough."""

    name = "tensors"
    in_thread = True
    merges = False

    def __init__(self) -> None:
        self._last: tuple[dict[str, Any], bytes] | None = None

    def prepare(self, adapter: Adapter, layout: Layout) -> PlainAdapter:
        """Copy the numbers to the host."""
        return plain_adapter(adapter, layout)

    def holds(self, prepared: PlainAdapter) -> bool:
        """Compare with the blob that was sent."""
        return self._last == (prepared.config, save(prepared.tensors))

    async def push(self, engine: AsyncLLM, name: str, int_id: int, prepared: PlainAdapter) -> str:
        """Serialise the tensors and swap them in on every worker."""
        new = prepared.config, await asyncio.to_thread(save, prepared.tensors)
        try:
            await engine.collective_rpc("rollproof_swap", args=(int_id, *new))
        except Exception:
            # The worker that failed has put the old adapter back; others may have gone on to the new.
            await self.restore(engine, name, int_id)
            raise
        self._last = new
        return IN_MEMORY

    async def restore(self, engine: AsyncLLM, name: str, int_id: int) -> None:
        """Send the last tensors again."""
        if self._last is not None:
            await engine.collective_rpc("rollproof_swap", args=(int_id, *self._last))
        else:
            await engine.remove_lora(int_id)

    def unloaded(self) -> None:
        """Forget the last adapter."""
        self._last = None

    def close(self) -> None:
        """Forget the last adapter."""
        self._last = None
