"""What can go wrong with an adapter on its way, each fault by any amount. Nothing here knows a rollout."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import replace

import torch

from rollproof.protocol import Adapter

Change = Callable[[Adapter, Adapter | None, float], Adapter]
"""What becomes of an adapter, given the one before it, by a fault of some size."""


def scaled(adapter: Adapter, last: Adapter | None, size: float, of: str = "") -> Adapter:
    """Every B, or those of modules with this in their name, times 1 + size."""
    return replace(
        adapter,
        tensors={n: t * (1 + size) if _is_b(n) and of in n else t for n, t in adapter.tensors.items()},
    )


def rslora_scaled(adapter: Adapter, last: Adapter | None, size: float) -> Adapter:
    """Every B times 1 + size where the adapter is an rsLoRA."""
    return scaled(adapter, last, size if adapter.config.use_rslora else 0.0)


def patterns_scaled(adapter: Adapter, last: Adapter | None, size: float) -> Adapter:
    """The alphas that modules have of their own, times 1 + size."""
    config = copy.deepcopy(adapter.config)
    config.alpha_pattern = {name: alpha * (1 + size) for name, alpha in (config.alpha_pattern or {}).items()}
    return replace(adapter, config=config)


def modules_lost(adapter: Adapter, last: Adapter | None, size: float) -> Adapter:
    """So many modules have no adapter."""
    lost = {name: torch.zeros_like(adapter.tensors[name]) for name in _some(adapter, size)}
    return replace(adapter, tensors={**adapter.tensors, **lost})


def modules_stale(adapter: Adapter, last: Adapter | None, size: float) -> Adapter:
    """So many modules keep the adapter of the version before."""
    if last is None:
        return adapter
    halves = [half for name in _some(adapter, size) for half in (name, name.replace("lora_B", "lora_A"))]
    return replace(adapter, tensors={**adapter.tensors, **{name: last.tensors[name] for name in halves}})


def rank_lost(adapter: Adapter, last: Adapter | None, size: float) -> Adapter:
    """So many components of rank 24 are lost, or a part of one; other ranks are whole."""
    if adapter.config.r != 24:
        return adapter
    keep = 1 - (size - torch.arange(23.0, -1.0, -1.0)).clamp(0, 1)
    return replace(adapter, tensors={n: t * keep if _is_b(n) else t for n, t in adapter.tensors.items()})


def _is_b(name: str) -> bool:
    return ".lora_B." in name or ".lora_embedding_B" in name


def _some(adapter: Adapter, size: float) -> list[str]:
    """The names of so many of its B, others for each adapter."""
    return random.Random(adapter.digest()).sample(sorted(filter(_is_b, adapter.tensors)), int(size))


CHANGES: dict[str, Change] = {
    "scale": scaled,
    "scale of k_proj": functools.partial(scaled, of=".k_proj."),
    "scale of the last layer": functools.partial(scaled, of=".layers.1."),
    "scale of rsLoRA": rslora_scaled,
    "scale of patterns": patterns_scaled,
    "modules lost": modules_lost,
    "modules stale": modules_stale,
    "rank lost": rank_lost,
}
