"""Making what a run needs on the spot: small random models with peaked logits, and unlike adapters.

Random weights usually give near-flat logits, which tell no two models apart and turn greedy decoding
into a coin toss. Here every layer keeps its input's variance, and the output layer is scaled so that
the entropy of the next token is a few nats. Nothing here knows a rollout or a clause.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .protocol import Adapter

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class Shape:
    """A made model's family, which is transformers' ``model_type``, and its size.

    ``dtype`` is that of the weights on disk. ``config`` goes to the family's config class as it is.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    dtype: torch.dtype = torch.float32
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """The standard deviation of the logits.

        Normal logits over V tokens freeze onto a few of them at a spread of sqrt(2 ln V) (the random
        energy model); just beyond it the entropy is between two and three nats for any V here.
        """
        return 1.1 * math.sqrt(2 * math.log(self.vocab_size))


_TINY = (1024, 128, 256, 2, 4, 2)

SHAPES = {
    "tiny-qwen2": Shape("qwen2", *_TINY),
    "tiny-llama": Shape("llama", *_TINY),
    "tiny-qwen3": Shape("qwen3", *_TINY, config={"head_dim": 32}),
    "tiny-gemma3": Shape(
        "gemma3_text",
        *_TINY,
        config={
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 128,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "tiny-qwen3-moe": Shape(
        "qwen3_moe",
        *_TINY,
        config={
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    "qwen2-0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, torch.bfloat16),
    "qwen2-7b": Shape("qwen2", 152064, 3584, 18944, 28, 28, 4, torch.bfloat16),
    "qwen2-32b": Shape("qwen2", 152064, 5120, 27648, 64, 40, 8, torch.bfloat16),
}
"""Every family that vLLM serves with LoRA in its own way: biases (Qwen2), norms of q and k (Qwen3), tied
and scaled embeddings, sliding windows and soft caps (Gemma), routed experts (MoE)."""


def made_parameters(shape: str) -> int:
    """How many parameters a made model has. Raises ValueError for an unknown shape."""
    return sum(parameter.numel() for parameter in _without_weights(shape).parameters())


def _without_weights(shape: str) -> Any:
    if shape not in SHAPES:
        raise ValueError(f"no made model is called {shape!r}; there are {', '.join(SHAPES)}")
    from transformers import AutoConfig, AutoModelForCausalLM

    size = SHAPES[shape]
    common = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_hidden_layers,
        "num_attention_heads": size.num_attention_heads,
        "num_key_value_heads": size.num_key_value_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(size.family, **common | dict(size.config))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=size.dtype)


def write_config(folder: str | Path, shape: str) -> Path:
    """Write a model's config.json alone, for an engine that makes its weights itself, and return the folder.

    Raises ValueError for an unknown shape, before anything is written.
    """
    _without_weights(shape).config.save_pretrained(folder)
    return Path(folder)


def make_model(folder: str | Path, shape: str = "tiny-qwen2", seed: int = 0) -> Path:
    """Write a random-weight model as a Hugging Face folder and return it.

    The same shape and seed give the same weights, bit for bit. Raises ValueError for an unknown
    shape, before anything is written.
    """
    model = _without_weights(shape).to_empty(device="cpu")
    model.tie_weights()
    size = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    # Buffers stay undefined: none is saved.
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_weights(name, parameter.shape, size, generator))
    path = Path(folder)
    model.save_pretrained(path)
    return path


_EMBEDDED = 0.1
"""What a tied embedding adds to the last layer's input, beside sublayers of 1: more, and every token
would predict itself."""

_ROUTED = (24.0, 18.0)
"""A token's embedding names its experts in dimensions of their own: as many as are chosen, the first louder
than the second. What a router of noise chooses is flipped by rounding at times, and then a right rollout is
further off than any noise that was measured. These are so loud that what adapters write there flips none."""

_QUIET, _LOUD = 0.1, 3.7
"""Norms make them quiet again, so that only the router, times ``_ROUTER``, sees much of them, and make up for
what they take from the others."""

_ROUTER = 4.0


def _weights(name: str, shape: torch.Size, size: Shape, generator: torch.Generator) -> torch.Tensor:
    experts = size.config.get("num_experts", 0)
    gemma, tied = size.family.startswith("gemma"), size.config.get("tie_word_embeddings", False)
    if name.endswith("norm.weight"):
        # Where q and k are normed, no adapter makes them wider: with less, attention hardly sees them at all.
        scale = 1.4 if "q_norm" in name or "k_norm" in name else 1.0
        if tied and name == "model.norm.weight":
            scale = size.spread / _EMBEDDED
        if gemma and "post_attention" in name:
            scale = 0.2  # it would make what is common to all tokens as loud as what is a token's own
        weight = torch.full(shape, scale - 1.0 if gemma else scale)
        if experts and shape[0] == size.hidden_size:
            weight *= _LOUD
            weight[:experts] = _QUIET
        return weight
    if name.endswith("mlp.gate.weight"):
        return _ROUTER * torch.eye(*shape)
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return noise * 0.1
    if "embed_tokens" in name:
        # Gemma multiplies embeddings by sqrt(hidden) on the way in.
        embedded = noise * (_EMBEDDED / math.sqrt(shape[-1]) if tied else 0.5)
        if experts:
            chosen = embedded[:, :experts].topk(len(_ROUTED)).indices
            embedded.scatter_add_(1, chosen, torch.tensor(_ROUTED).expand(len(chosen), -1))
        return embedded
    if "lm_head" in name:
        return noise * (size.spread / math.sqrt(shape[-1]))
    if any(part in name for part in ("o_proj", "down_proj")):
        noise[..., :experts, :] = 0
    # Half as wide, so that attention is not so sharp that it blows up rounding errors.
    width = 0.5 if any(part in name for part in ("q_proj", "k_proj")) else 1.0
    return noise * (width / math.sqrt(shape[-1]))


def make_adapter(
    weights: Mapping[str, torch.Tensor],
    version: int,
    generator: torch.Generator,
    *,
    strength: float,
    rank: int = 8,
    embedding: bool = False,
    **config: Any,
) -> Adapter:
    """A random adapter on every given layer that its config targets, unlike any other from ``generator``.

    ``weights`` maps layer names to their weights [out, in]; ``embedding`` says that they are embeddings,
    [hidden, vocabulary], whose halves PEFT names otherwise. Each layer's change has ``strength``
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
        form = "lora_embedding_{}" if embedding else "lora_{}.weight"
        tensors[f"base_model.model.{name}.{form.format('A')}"] = a
        tensors[f"base_model.model.{name}.{form.format('B')}"] = b
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
