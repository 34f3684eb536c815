"""What modules a model has, from its folder and without its weights.

Nothing here knows an engine or an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelLayers:
    """A model's modules: ``names`` of all, ``shapes`` (in, out) of the linear ones and of the embedding,
    whose input is the vocabulary, and what the ``output`` layer and the ``embedding`` are called."""

    names: frozenset[str]
    shapes: Mapping[str, tuple[int, int]]
    output: str
    embedding: str


def model_layers(model_path: str) -> ModelLayers:
    """The modules of the model in this folder, without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    shapes = {
        name: (module.in_features, module.out_features)
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
    }
    rows = next((name for name, module in modules.items() if module is embedding), "")
    return ModelLayers(
        names=frozenset(modules),
        shapes=shapes | {rows: (embedding.num_embeddings, embedding.embedding_dim)},
        output=next((name for name, module in modules.items() if module is head), ""),
        embedding=rows,
    )
