"""What a case is: a rollout, what it has to fail, and what it needs to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollproof.protocol import RolloutSpec
from rollproof_reference import AsyncRollout
from rollproof_reference.sync import Sync
from rollproof_reference.sync.disk import DiskSync


@dataclass(frozen=True)
class Case:
    """One rollout: ``fails`` is the exact set, blocked clauses apart; ``word`` is in each message.

    ``engine`` are engine arguments that need an engine of its own; ``cpu_only`` marks faults of
    vLLM's CPU kernels, or of float32, ``gpu_only`` those of what only a GPU does; ``does`` says what
    is wrong where the fault isn't in the rollout's class; ``deadline_scale`` is for those that hang;
    ``model`` is a made one that needs an engine of its own.
    """

    name: str
    rollout: type[AsyncRollout]
    fails: frozenset[str] = frozenset()
    word: str = ""
    sync: Callable[[RolloutSpec], Sync] = lambda spec: DiskSync(spec.workdir)
    engine: dict[str, Any] = field(default_factory=dict)
    cpu_only: bool = False
    gpu_only: bool = False
    does: str = ""
    deadline_scale: float = 1.0
    model: str = ""

    @property
    def fault(self) -> str:
        """What it does wrong, in a sentence: its rollout's own, where that isn't the reference."""
        return self.does or " ".join((self.rollout.__doc__ or "").split())


def bad(rollout: type[AsyncRollout], fails: str, word: str, **options: Any) -> Case:
    """A case called as its class is, in kebab case; ``fails`` are clause ids between spaces."""
    name = "".join(f"-{c.lower()}" if c.isupper() else c for c in rollout.__name__).lstrip("-")
    return Case(name, rollout, frozenset(fails.split()), word, **options)
