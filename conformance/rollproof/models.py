"""Making what a run needs on the spot: small random models with peaked logits, and unlike adapters.

Random weights usually give near-flat logits, which tell no two models apart and turn greedy decoding
into a coin toss. Here every layer keeps its input's variance, and the output layer is scaled so that
the entropy of the next token is a few nats. Nothing here knows a rollout or a clause.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .protocol import Adapter

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class Shape:
    """The size of a Qwen2 model; ``dtype`` is that of the weights on disk."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    dtype: torch.dtype = torch.float32


SHAPES = {
    "tiny-qwen2": Shape(1024, 128, 256, 2, 4, 2),
    "qwen2-0.5b": Shape(151936, 896, 4864, 24, 14, 2, torch.bfloat16),
}


def make_model(folder: str | Path, shape: str = "tiny-qwen2", seed: int = 0) -> Path:
    """Write a random-weight model as a Hugging Face folder and return it.

    The same shape and seed give the same weights, bit for bit. Raises ValueError for an unknown
    shape, before anything is written.
    """
    if shape not in SHAPES:
        raise ValueError(f"no made model is called {shape!r}; there are {', '.join(SHAPES)}")
    from transformers import AutoModelForCausalLM, Qwen2Config

    size = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=size.dtype)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_weights(name, parameter.shape, size, generator))
    for module in model.modules():  # buffers, which to_empty left undefined
        if hasattr(module, "inv_freq"):
            module.__init__(config)
    path = Path(folder)
    model.save_pretrained(path)
    return path


def _weights(name: str, shape: torch.Size, size: Shape, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return noise * 0.1
    if "embed_tokens" in name:
        return noise * 0.5
    if "lm_head" in name:
        # Normal logits over V tokens freeze onto a few of them at a spread of sqrt(2 ln V) (the random
        # energy model); just beyond it the entropy is between two and three nats for any V here.
        spread = 1.1 * math.sqrt(2 * math.log(size.vocab_size))
        return noise * (spread / math.sqrt(shape[1]))
    # Half as wide, so that attention is not so sharp that it blows up rounding errors.
    width = 0.5 if "q_proj" in name or "k_proj" in name else 1.0
    return noise * (width / math.sqrt(shape[1]))


def make_adapter(
    weights: Mapping[str, torch.Tensor],
    version: int,
    generator: torch.Generator,
    *,
    strength: float,
    rank: int = 8,
    **config: Any,
) -> Adapter:
    """A random adapter on every given layer that its config targets, unlike any other from ``generator``.

    ``weights`` maps layer names to their weights [out, in]. Each layer's change has ``strength``
    times the standard deviation of its weight, whatever its rank and scale. ``config`` goes to
    PEFT's LoraConfig (``rank_pattern``, ``use_rslora``, ...).
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    config.setdefault("lora_alpha", 2 * rank)  # a scale of 2: one that is dropped shows
    config.setdefault("target_modules", sorted({name.rpartition(".")[2] for name in weights}))
    lora: LoraConfig = LoraConfig(r=rank, task_type="CAUSAL_LM", **config)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not check_target_module_exists(lora, name):
            continue
        n_out, n_in = weight.shape
        ranks, alphas = lora.rank_pattern or {}, lora.alpha_pattern or {}
        rank_here = ranks.get(get_pattern_key(ranks.keys(), name), lora.r)
        alpha = alphas.get(get_pattern_key(alphas.keys(), name), lora.lora_alpha)
        scale = alpha / (math.sqrt(rank_here) if lora.use_rslora else rank_here)
        a = torch.randn(rank_here, n_in, generator=generator)
        b = torch.randn(n_out, rank_here, generator=generator)
        b *= strength * weight.std().item() / (scale * math.sqrt(rank_here))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return Adapter(version, lora, tensors)


def main() -> None:
    """``python -m rollproof.models SHAPE FOLDER``: make a model for ``--model``."""
    parser = argparse.ArgumentParser(prog="python -m rollproof.models", description=main.__doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make_model(given.folder, given.shape, given.seed))


if __name__ == "__main__":
    main()
