"""How an adapter's weights reach the engine: one strategy a file.

A strategy makes ``adapter`` the only weights under ``int_id``, whole or not at all, and returns the
path that requests carry. It knows nothing of versions, requests or KV: that is the rollout's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from ..check import PlainAdapter


class Sync(Protocol):
    """A way to bring an adapter's weights into the engine."""

    name: str

    async def push(self, engine: AsyncLLM, name: str, int_id: int, adapter: PlainAdapter) -> str:
        """Replace the weights under ``int_id``; return the ``lora_path`` for requests."""
        ...

    async def restore(self, engine: AsyncLLM, name: str, int_id: int) -> None:
        """Load what was pushed last once more, which the engine has lost; without any, remove ``int_id``."""
        ...

    def unloaded(self) -> None:
        """The adapter was removed from the engine: there is nothing to go back to."""
        ...

    def close(self) -> None:
        """Give back what the strategy holds outside the engine."""
        ...
