"""An adapter's numbers in the plainest equal form: one rank, and a scale of exactly 1.

Nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .check import AdapterError
from .copying import Fill

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
    """Copy an adapter with its scales inside B, in the layout's dtype: cast first, and scaled then.

    Raises AdapterError for a number that is not finite, or not in that dtype. The adapter's own
    tensors are only read. On a GPU all is computed there, and crosses to the host at once.
    """
    names = [part.a for part in layout.parts] + [part.b for part in layout.parts]
    scales = [1.0] * len(layout.parts) + [part.scale for part in layout.parts]
    sources = [adapter.tensors[name].detach() for name in names]
    sizes = [source.numel() for source in sources]

    def views(flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(flat, sizes)
        return [piece.view(source.shape) for piece, source in zip(pieces, sources, strict=True)]

    copied = torch.empty(sum(sizes), dtype=layout.dtype, device=sources[0].device)
    bad = torch.zeros(1, dtype=torch.int32, device=copied.device)
    Fill(views(copied), scales, bad)(sources)
    if bad.item():
        raise infinite(names, sources, scales, layout.dtype)
    return PlainAdapter(
        layout.rank, layout.target_modules, dict(zip(names, views(copied.cpu()), strict=True))
    )


def infinite(
    names: Sequence[str], sources: Sequence[torch.Tensor], scales: Sequence[float], dtype: torch.dtype
) -> AdapterError:
    """What to say of the first tensor that has a number which is not finite, or would have one."""
    for name, source, scale in zip(names, sources, scales, strict=True):
        if bad := int((~torch.isfinite(source)).sum()):
            return AdapterError(
                f"tensor {name!r} has {bad} of {source.numel()} values that are NaN or infinite"
            )
        if not bool(torch.isfinite(source.to(dtype) * scale).all()):
            return AdapterError(
                f"tensor {name!r} overflows in {dtype}: its largest value with the "
                f"scale is {source.float().abs().max().item() * abs(scale):.3g}"
            )
    return AdapterError("the adapter changed while it was copied; send it once more, and wait for the update")
