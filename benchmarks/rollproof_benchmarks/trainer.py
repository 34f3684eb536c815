"""A stand-in for the trainer: an adapter in the trainer's memory that changes before every update.

It knows the model's shapes and no rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollproof.protocol import Adapter

CHANGE = 1.001
"""A training step, as far as an engine can tell: other numbers in the same tensors."""


class Trainer:
    """An adapter on every linear layer of ``shapes`` (name: (in, out)), in ``dtype`` on ``device``."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, int]], rank: int, dtype: torch.dtype, device: str
    ) -> None:
        from peft import LoraConfig

        leaves = sorted({name.rpartition(".")[2] for name in shapes})
        self.rank = rank
        self._config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=leaves, task_type="CAUSAL_LM")
        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, columns: int) -> torch.Tensor:
            noise = torch.randn(rows, columns, generator=generator, device=device)
            return noise.div(10 * columns**0.5).to(dtype)

        self._tensors = {}
        for name, (n_in, n_out) in shapes.items():
            self._tensors[f"base_model.model.{name}.lora_A.weight"] = random(rank, n_in)
            self._tensors[f"base_model.model.{name}.lora_B.weight"] = random(n_out, rank)
        self._all = list(self._tensors.values())
        self._version = 0

    @property
    def bytes(self) -> int:
        """The adapter's size in the trainer's memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._all)

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return sum(tensor.numel() for tensor in self._all)

    def step(self) -> Adapter:
        """The next version, complete in memory when this returns."""
        torch._foreach_mul_(self._all, CHANGE)
        if self._all[0].is_cuda:
            torch.cuda.synchronize(self._all[0].device)
        self._version += 1
        return Adapter(self._version, self._config, self._tensors)

    def describe(self) -> dict[str, Any]:
        """What a result has to say of it."""
        first = self._all[0]
        return {
            "rank": self.rank,
            "trainer dtype": str(first.dtype).removeprefix("torch."),
            "trainer device": first.device.type,
            "adapter bytes": self.bytes,
            "adapter tensors": len(self._all),
        }
