"""How an adapter's weights reach the engine: one strategy a file.

A strategy makes ``adapter`` the only weights under ``int_id``, whole or not at all, and returns the
path that requests carry. It knows nothing of versions, requests or KV: that is the rollout's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import Adapter

    from ..check import Layout


class Prepared(Protocol):
    """An adapter that was checked whole and copied, ready to be pushed."""

    @property
    def rank(self) -> int:
        """The highest that a module has."""
        ...


P = TypeVar("P", bound=Prepared)


class Sync(Protocol[P]):
    """A way to bring an adapter's weights into the engine."""

    name: str
    in_thread: bool
    """Whether ``prepare`` takes long, and so has to run beside the event loop."""
    merges: bool
    """Whether the adapter becomes part of the engine's own weights. It has no id there then, the base model
    can't be served beside it, and DoRA can be."""

    def prepare(self, adapter: Adapter, layout: Layout) -> P:
        """Copy the adapter's numbers, or begin to: what was pushed last still serves, whatever comes of it.

        Raises AdapterError for numbers that can't be served, where it finds them itself.
        """
        ...

    def holds(self, prepared: P) -> bool:
        """Whether this is, number for number, what was pushed last."""
        ...

    async def push(self, engine: AsyncLLM, name: str, int_id: int, prepared: P) -> str:
        """Replace the weights under ``int_id``; return the ``lora_path`` for requests, "" for none.

        Afterwards the adapter's own tensors aren't needed any more. Raises AdapterError for numbers that
        can't be served, before anything has changed.
        """
        ...

    async def restore(self, engine: AsyncLLM, name: str, int_id: int) -> None:
        """Load what was pushed last once more, which the engine has lost; without any, remove ``int_id``."""
        ...

    def unloaded(self) -> None:
        """Forget what was pushed last: ``restore`` removes it from the engine."""
        ...

    def close(self) -> None:
        """Give back what the strategy holds outside the engine."""
        ...
