"""Checking how an adapter lies on the model, before anything changes.

An engine that meets a tensor it can't place tends to skip it, so every name, shape, rank and dtype is
compared here with the model's own modules first. The numbers are looked at where they are copied
(``plain.py``, and what a strategy does of its own). Nothing here knows an engine.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from .layers import ModelLayers
from .rank import RankError, checked_rank

if TYPE_CHECKING:
    from peft import LoraConfig

    from rollproof.protocol import Adapter

_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?:"
    r"(?P<half>[AB])\.weight|embedding_(?P<row>[AB])|(?P<magnitude>magnitude)_vector)"
)
_Halves = dict[str, dict[str, tuple[str, torch.Tensor]]]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of a PEFT config that change what the adapter computes and have no place in plain A and B.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save",
    "lora_bias": "a bias on LoRA layers (lora_bias)",
    "layer_replication": "layer_replication",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "arrow_config": "Arrow routing",
}

# Those that set the first A and B and leave the base weights as they are.
_PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")


class AdapterError(ValueError):
    """An adapter that can't be served as it is. The message names the part, the bound and the mend."""


@dataclass(frozen=True)
class Part:
    """One module's pair: the names of A [rank, in] and B [out, rank], and the scale of their product.

    ``magnitude`` names the length of each row [out] of the adapted weight (DoRA, arXiv 2402.09353).
    """

    module: str
    rank: int
    scale: float
    a: str
    b: str
    magnitude: str | None = None


@dataclass(frozen=True)
class Layout:
    """How an adapter lies on a model: all about it but its numbers, which are to be served in ``dtype``."""

    parts: tuple[Part, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """The highest that a module has."""
        return max(part.rank for part in self.parts)

    @cached_property
    def target_modules(self) -> tuple[str, ...]:
        """The last name parts of the modules."""
        return tuple(sorted({part.module.rpartition(".")[2] for part in self.parts}))


class Checker:
    """Checks the adapters of one rollout by ``check``; one like the last is only compared with it.

    ``check`` is ``layout`` with all that is known of the rollout.
    """

    def __init__(self, check: Callable[[Adapter], Layout]) -> None:
        self._check = check
        self._last: tuple[Any, Any, Layout] | None = None

    def layout(self, adapter: Adapter) -> Layout:
        """How the adapter lies on the model. Raises AdapterError or RankError; tensors aren't read."""
        form = list(adapter.tensors), list(map(attrgetter("shape", "dtype"), adapter.tensors.values()))
        if self._last is not None and self._last[0] == form and self._last[1] == adapter.config:
            return self._last[2]
        found = self._check(adapter)
        # The trainer may go on to change its config.
        self._last = form, copy.deepcopy(adapter.config), found
        return found


def layout(
    adapter: Adapter,
    layers: ModelLayers,
    served: Collection[str],
    max_rank: int,
    dtype: torch.dtype,
    *,
    dora: bool = False,
    unserved: Mapping[str, str] | None = None,
) -> Layout:
    """Check an adapter's config and the form of its tensors against the model.

    ``served`` are the last name parts that the engine puts an adapter on (empty: unknown), ``unserved``
    says of others why it doesn't, and ``dora`` whether a magnitude can be served. Raises AdapterError or
    RankError.
    """
    config = adapter.config
    _check_config(config, dora)
    halves = _split(adapter.tensors, layers.embedding)
    _check_targets(config, halves, layers, served, unserved or {})
    _check_magnitudes(config, halves, layers)
    scales = {module: _rank_and_scale(config, module) for module in sorted(halves)}
    highest = max(rank for rank, _ in scales.values())
    if highest > max_rank:
        raise RankError(
            f"rank {highest} is above {max_rank}, the highest this rollout was started for; "
            f"start it with max_lora_rank={highest} or more"
        )
    parts = []
    for module, (rank, scale) in scales.items():
        n_in, n_out = layers.shapes[module]
        shapes = {"A": (rank, n_in), "B": (n_out, rank), "magnitude": (n_out,)}
        for half, named in halves[module].items():
            _check_form(*named, half, shapes[half])
        names = {half: name for half, (name, _) in halves[module].items()}
        parts.append(Part(module, rank, scale, names["A"], names["B"], names.get("magnitude")))
    return Layout(tuple(parts), dtype)


def _check_config(config: LoraConfig, dora: bool) -> None:
    found = [
        text
        for name, text in _UNSUPPORTED.items()
        if getattr(config, name, None) and not (dora and name == "use_dora")
    ]
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init not in _PLAIN_INITS:
        found.append(f"init_lora_weights={init!r} (it rewrites the base weights)")
    if (bias := getattr(config, "bias", "none")) != "none":
        found.append(f"bias={bias!r}")
    if found:
        raise AdapterError(
            f"the adapter's config uses {', '.join(found)}, which can't be served as a plain LoRA; "
            "train without it, or merge the adapter into the base weights"
        )


def _split(tensors: Mapping[str, torch.Tensor], embedding: str) -> _Halves:
    if not tensors:
        raise AdapterError("the adapter has no tensors at all; send what get_peft_model_state_dict gives")
    halves: _Halves = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        wanted = "row" if match is not None and match["module"] == embedding else "half"
        if match is None or not (match[wanted] or match["magnitude"]):
            raise AdapterError(
                f"tensor {name!r} has no name of PEFT's form "
                "'base_model.model.<module>.lora_A.weight' (or lora_B; for an embedding lora_embedding_A); "
                "send what get_peft_model_state_dict gives, without wrapper prefixes"
            )
        halves.setdefault(match["module"], {})[match[wanted] or match["magnitude"]] = name, tensor
    for module, pair in halves.items():
        if "A" not in pair and "B" not in pair:
            raise AdapterError(f"{pair['magnitude'][0]!r} came, and neither lora_A nor lora_B of {module!r}")
        for half, other in ("AB", "BA"):
            if half not in pair:
                start, _, end = pair[other][0].rpartition(f"_{other}")
                raise AdapterError(f"tensor '{start}_{half}{end}' is missing beside its other half")
    return halves


def _check_targets(
    config: LoraConfig,
    halves: Collection[str],
    layers: ModelLayers,
    served: Collection[str],
    unserved: Mapping[str, str],
) -> None:
    targeted = _targeted(config, layers)
    if other := sorted(targeted - set(layers.shapes)):
        raise AdapterError(
            f"the config targets {other[0]!r}, which is no linear layer and not the embedding; this rollout "
            "serves those alone"
        )
    for module in halves:
        leaf = module.rpartition(".")[2]
        if module not in layers.shapes:
            near = sorted(name for name in layers.shapes if name.endswith(f".{leaf}"))
            hint = f"the model has {near[0]!r}" if near else f"it has {', '.join(_leaves(layers.shapes))}"
            raise AdapterError(f"the model has no linear layer {module!r}; {hint}")
        if module not in targeted:
            raise AdapterError(f"tensors came for {module!r}, which the config does not target")
        if served and leaf not in served:
            why = f" ({unserved[leaf]})" if leaf in unserved else ""
            raise AdapterError(
                f"the engine puts no adapter on {module!r}{why}; it does on {', '.join(sorted(served))}"
            )
    if lost := sorted(targeted - set(halves)):
        raise AdapterError(
            f"the config targets {lost[0]!r} but no tensor came for it"
            + (f" (nor for {len(lost) - 1} more)" if len(lost) > 1 else "")
            + "; send all of the adapter's tensors, or narrow target_modules"
        )


def _check_magnitudes(config: LoraConfig, halves: _Halves, layers: ModelLayers) -> None:
    for module, pair in halves.items():
        if config.use_dora and module == layers.embedding:
            raise AdapterError(
                f"DoRA on the embedding {module!r} can't be served; leave it out of the targets"
            )
        if config.use_dora and "magnitude" not in pair:
            start = pair["A"][0].removesuffix("lora_A.weight")
            raise AdapterError(f"the config uses DoRA, and tensor '{start}lora_magnitude_vector' is missing")
        if "magnitude" in pair and not config.use_dora:
            raise AdapterError(
                f"tensor {pair['magnitude'][0]!r} came, and the config doesn't say use_dora; export the one "
                "that the adapter was trained with"
            )


def _leaves(names: Collection[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _targeted(config: LoraConfig, layers: ModelLayers) -> set[str]:
    """The modules that PEFT itself would put this adapter on."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules is None:
        raise AdapterError("the config has no target_modules; export the one the adapter was trained with")
    if config.target_modules == "all-linear":
        # As PEFT expands it: every linear layer but the output one. exclude_modules still counts.
        config = copy.copy(config)
        config.target_modules = set(layers.shapes) - {layers.output, layers.embedding}
    return {name for name in layers.names if name and check_target_module_exists(config, name)}


def _rank_and_scale(config: LoraConfig, module: str) -> tuple[int, float]:
    """A module's rank and scale: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
    from peft.utils.other import get_pattern_key

    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = checked_rank(ranks.get(get_pattern_key(ranks.keys(), module), config.r), f"the rank of {module}")
    alpha = float(alphas.get(get_pattern_key(alphas.keys(), module), config.lora_alpha))
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    if not math.isfinite(scale) or scale == 0:
        raise AdapterError(
            f"lora_alpha {alpha:g} gives {module!r} the scale {scale:g}, so the adapter would be lost; "
            "export the config that the adapter was trained with"
        )
    return rank, scale


def _check_form(name: str, tensor: torch.Tensor, half: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        layout = {"A": "[rank, in]", "B": "[out, rank]", "magnitude": "[out]"}[half]
        raise AdapterError(
            f"tensor {name!r} has the shape {list(tensor.shape)}; the model and the config's rank "
            f"make it {list(shape)} ({layout})"
        )
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise AdapterError(f"tensor {name!r} has the dtype {tensor.dtype}; allowed: {allowed}")
