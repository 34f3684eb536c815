"""A minimal async rollout on vLLM that keeps a LoRA adapter in step with its trainer.

Read ``rollout.py`` first; the rest is what it stands on.
"""

from .check import AdapterError
from .engine import start_engine
from .rank import RankError, max_lora_rank
from .rollout import AsyncRollout, RolloutClosedError
from .start import make

__all__ = [
    "AdapterError",
    "AsyncRollout",
    "RankError",
    "RolloutClosedError",
    "make",
    "max_lora_rank",
    "start_engine",
]
