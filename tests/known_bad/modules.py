"""Faults in where a module's weights end up: in another slice's slot, or nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.protocol import Adapter
from rollproof_reference import AsyncRollout

if TYPE_CHECKING:
    from rollproof_reference.plain import PlainAdapter


class VInTheSlotOfK(AsyncRollout):
    """Fills the slots of q, k and v in order, so that v takes k's where there is no k (unsloth-zoo#941)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        return _moved(super()._prepare(adapter), "v_proj", "k_proj")


class UpInTheSlotOfGate(AsyncRollout):
    """Picks slices by their index among those that came, so that up alone is gate (verl#7453)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        return _moved(super()._prepare(adapter), "up_proj", "gate_proj")


class LosesTheEnds(AsyncRollout):
    """Takes adapters on the embedding and the output layer, and serves neither (experiential#299)."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        for name, tensor in plain.tensors.items():
            if "embed_tokens" in name or "lm_head" in name:
                tensor.zero_()
        return plain


def _moved(plain: PlainAdapter, leaf: str, slot: str) -> PlainAdapter:
    """With the weights of one kind of module under the name of another, where that has none of its own."""
    if slot in plain.target_modules or leaf not in plain.target_modules:
        return plain
    tensors = {name.replace(f".{leaf}.", f".{slot}."): tensor for name, tensor in plain.tensors.items()}
    leaves = {slot if name == leaf else name for name in plain.target_modules}
    return replace(plain, tensors=tensors, target_modules=tuple(sorted(leaves)))
