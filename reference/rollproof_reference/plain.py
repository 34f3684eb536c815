"""An adapter's numbers in the plainest equal form: one rank, and a scale of exactly 1.

Nothing here knows an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .check import AdapterError

if TYPE_CHECKING:
    from rollproof.protocol import Adapter

    from .check import Layout


@dataclass(frozen=True)
class PlainAdapter:
    """An adapter with one rank and a scale of exactly 1: each module's scale is inside its B.

    ``tensors`` holds PEFT's names; A is [rank of the module, in], B is [out, rank of the module],
    all in the engine's dtype, contiguous and on the CPU, sharing no memory with the trainer's.
    """

    rank: int
    target_modules: tuple[str, ...]
    tensors: dict[str, torch.Tensor]

    @property
    def config(self) -> dict[str, Any]:
        """The PEFT config that goes with the tensors (``adapter_config.json``)."""
        return plain_config(self.rank, self.target_modules)


def plain_config(rank: int, target_modules: tuple[str, ...]) -> dict[str, Any]:
    """A PEFT config that scales by exactly 1."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(target_modules),
        "bias": "none",
        "inference_mode": True,
    }


def plain_adapter(adapter: Adapter, layout: Layout) -> PlainAdapter:
    """Copy an adapter with its scales inside B, in the layout's dtype.

    Raises AdapterError for a number that is not finite, or not in that dtype. The adapter's own
    tensors are only read.
    """
    tensors: dict[str, torch.Tensor] = {}
    for part in layout.parts:
        for name, factor in ((part.a, 1.0), (part.b, part.scale)):
            tensor = adapter.tensors[name].detach()
            if not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise AdapterError(
                    f"tensor {name!r} has {bad} of {tensor.numel()} values that are NaN or infinite"
                )
            tensors[name] = _cast(name, tensor.to("cpu", torch.float32) * factor, layout.dtype)
    return PlainAdapter(layout.rank, layout.target_modules, tensors)


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A tensor that needs no cast would still share the trainer's memory.
    cast = tensor.to(dtype, copy=True).contiguous()
    if not bool(torch.isfinite(cast).all()):
        raise AdapterError(
            f"tensor {name!r} overflows in {dtype}: its largest value with the "
            f"scale is {tensor.abs().max().item():.3g}"
        )
    return cast
