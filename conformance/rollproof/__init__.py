"""rollproof: proof that an RL rollout samples with the LoRA adapter the trainer just sent.

``await check_rollout(factory)`` judges a rollout; ``pytest --pyargs rollproof.clauses --rollout
pkg.mod:factory`` does the same and writes a report. What a rollout has to provide is in
``rollproof.protocol``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .factory import FactoryError
from .outcome import Outcome, Result
from .protocol import (
    Adapter,
    Capability,
    Completion,
    GenerateRequest,
    LoadedAdapter,
    Rollout,
    RolloutSpec,
)
from .settings import Settings

if TYPE_CHECKING:
    from .runner import Report, check_rollout

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Capability",
    "Completion",
    "FactoryError",
    "GenerateRequest",
    "LoadedAdapter",
    "Outcome",
    "Report",
    "Result",
    "Rollout",
    "RolloutSpec",
    "Settings",
    "check_rollout",
]


def __getattr__(name: str) -> Any:
    # The pytest plugin imports this package in every run; only judging needs torch.
    if name in ("Report", "check_rollout"):
        from . import runner

        return getattr(runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
