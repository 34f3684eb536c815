"""A bad adapter is refused whole, and the error says what is wrong and what would be right."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import MakeAdapter
from rollproof.models import make_adapter
from rollproof.oracle import Oracle
from rollproof.protocol import Adapter
from rollproof_reference import AdapterError, RankError
from rollproof_reference.check import Checker, layout
from rollproof_reference.layers import ModelLayers, model_layers
from rollproof_reference.plain import PlainAdapter, plain_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SERVED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="session")
def layers(model_path: Path) -> ModelLayers:
    return model_layers(str(model_path))


@pytest.fixture
def check(layers: ModelLayers):
    def run(adapter: Adapter, dtype: torch.dtype = torch.float32) -> PlainAdapter:
        return plain_adapter(adapter, layout(adapter, layers, SERVED, 24, dtype))

    return run


def with_tensor(adapter: Adapter, name: str, tensor: torch.Tensor | None) -> Adapter:
    tensors = dict(adapter.tensors)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    return Adapter(adapter.version, adapter.config, tensors)


def renamed(adapter: Adapter, old: str, new: str) -> Adapter:
    tensors = {name.replace(old, new): tensor for name, tensor in adapter.tensors.items()}
    return Adapter(adapter.version, adapter.config, tensors)


def test_a_right_adapter_keeps_its_product(check, adapter: MakeAdapter):
    mine = adapter(rank=4, lora_alpha=12)
    plain = check(mine)
    b = Q.replace("lora_A", "lora_B")
    torch.testing.assert_close(plain.tensors[b] @ plain.tensors[Q], 3 * mine.tensors[b] @ mine.tensors[Q])
    assert plain.rank == plain.config["r"] == plain.config["lora_alpha"] == 4


def test_patterns_and_rslora_end_inside_b(check, adapter: MakeAdapter):
    mine = adapter(rank=4, lora_alpha=8, use_rslora=True, rank_pattern={"q_proj": 9})
    plain = check(mine)
    b = Q.replace("lora_A", "lora_B")
    torch.testing.assert_close(plain.tensors[b], mine.tensors[b] * (8 / math.sqrt(9)))
    assert plain.rank == 9
    assert not {"rank_pattern", "alpha_pattern", "use_rslora"} & set(plain.config)


def test_the_trainers_tensors_are_neither_shared_nor_written(check, adapter: MakeAdapter):
    mine = adapter()
    before = {name: tensor.clone() for name, tensor in mine.tensors.items()}
    plain = check(mine)
    for name, tensor in mine.tensors.items():
        assert torch.equal(tensor, before[name])
        tensor.fill_(7)
    assert not any((tensor == 7).all() for tensor in plain.tensors.values())


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda a: with_tensor(a, Q, torch.zeros(8, 7)),
            r"q_proj.lora_A.weight' has the shape \[8, 7\]; .* make it \[8, 128\] \(\[rank, in\]\)",
        ),
        (
            lambda a: with_tensor(a, Q, torch.full((8, 128), math.nan)),
            "q_proj.lora_A.weight' has 1024 of 1024 values that are NaN or infinite",
        ),
        (
            lambda a: with_tensor(a, Q, torch.zeros(8, 128, dtype=torch.int8)),
            "has the dtype torch.int8; allowed: float32, bfloat16, float16",
        ),
        (lambda a: with_tensor(a, Q, None), "q_proj.lora_A.weight' is missing beside its other half"),
        (lambda a: Adapter(1, a.config, {}), "no tensors at all"),
        (
            lambda a: renamed(a, "base_model.model.", ""),
            "has no name of PEFT's form .*without wrapper prefixes",
        ),
        (
            lambda a: renamed(a, "self_attn", "attention"),
            "no linear layer .*; the model has 'model.layers.0.self",
        ),
        (lambda a: renamed(a, "layers.1.", "layers.9."), "no linear layer 'model.layers.9."),
        (
            lambda a: Adapter(1, a.config, {n: t for n, t in a.tensors.items() if "layers.1" not in n}),
            r"targets 'model.layers.1.mlp.down_proj' but no tensor came for it \(nor for 6 more\)",
        ),
    ],
)
def test_bad_tensors_are_named(check, adapter: MakeAdapter, break_it, message: str):
    with pytest.raises(AdapterError, match=message):
        check(break_it(adapter()))


@pytest.fixture
def embedded(base_oracle: Oracle) -> Adapter:
    generator = torch.Generator().manual_seed(0)
    return make_adapter(base_oracle.embedding(), 1, generator, strength=0.5, embedding=True)


def test_an_embedding_is_served_where_the_engine_has_one(check, layers: ModelLayers, embedded: Adapter):
    plain = plain_adapter(embedded, layout(embedded, layers, (*SERVED, "embed_tokens"), 24, torch.float32))
    a, b = embedded.tensors
    assert (a, b) == tuple(plain.tensors)
    torch.testing.assert_close(plain.tensors[b], 2 * embedded.tensors[b])
    with pytest.raises(AdapterError, match="the engine puts no adapter on 'model.embed_tokens'; it does on"):
        check(embedded)


def test_the_halves_of_an_embedding_have_names_of_their_own(
    check, adapter: MakeAdapter, embedded: Adapter, layers: ModelLayers
):
    for mine, old, new in (
        (adapter(), "q_proj.lora_A.weight", "q_proj.lora_embedding_A"),
        (embedded, "lora_embedding_A", "lora_A.weight"),
    ):
        with pytest.raises(AdapterError, match="has no name of PEFT's form"):
            layout(renamed(mine, old, new), layers, (), 24, torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "config uses DoRA, which can't be served"),
        ({"modules_to_save": ["lm_head"]}, "config uses modules_to_save"),
        ({"bias": "all"}, "config uses bias='all'"),
        ({"lora_bias": True}, r"config uses a bias on LoRA layers \(lora_bias\)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' .it rewrites the base weights."),
        ({"target_modules": {"q_proj", "mlp"}}, "targets 'model.layers.0.mlp', which is no linear layer and"),
        ({"target_modules": {"q_proj"}}, "tensors came for 'model.layers.0.self_attn.k_proj', which"),
        ({"target_modules": None}, "the config has no target_modules"),
        ({"lora_alpha": 0}, "lora_alpha 0 gives .* the scale 0, so the adapter would be lost"),
    ],
)
def test_unsupported_configs_are_named(check, adapter: MakeAdapter, options, message: str):
    mine = adapter()
    for name, value in options.items():
        setattr(mine.config, name, value)
    with pytest.raises(AdapterError, match=message):
        check(mine)


@pytest.fixture
def dora(base_oracle: Oracle) -> Adapter:
    return Adapter(1, *base_oracle.peft_state(use_dora=True, r=4, target_modules=["q_proj"]))


def test_dora_is_read_where_it_can_be_served(layers: ModelLayers, dora: Adapter):
    found = layout(dora, layers, SERVED, 24, torch.float32, dora=True)
    assert [part.magnitude for part in found.parts] == [n for n in dora.tensors if "magnitude" in n]
    name = found.parts[0].magnitude
    assert name is not None
    refused = partial(layout, layers=layers, served=SERVED, max_rank=24, dtype=torch.float32, dora=True)
    with pytest.raises(AdapterError, match="q_proj.lora_magnitude_vector' is missing"):
        refused(with_tensor(dora, name, None))
    with pytest.raises(AdapterError, match=r"has the shape \[7\]; .* make it \[128\] \(\[out\]\)"):
        refused(with_tensor(dora, name, torch.ones(7)))
    alone = {name: tensor for name, tensor in dora.tensors.items() if "magnitude" in name}
    with pytest.raises(AdapterError, match="and neither lora_A nor lora_B of 'model.layers.0"):
        refused(Adapter(1, dora.config, alone))
    dora.config.use_dora = False
    with pytest.raises(AdapterError, match="magnitude_vector' came, and the config doesn't say use_dora"):
        refused(dora)


def test_dora_on_an_embedding_is_refused(base_oracle: Oracle, layers: ModelLayers):
    config, state = base_oracle.peft_state(use_dora=True, r=4, target_modules=["embed_tokens"])
    with pytest.raises(AdapterError, match="DoRA on the embedding 'model.embed_tokens' can't be served"):
        layout(Adapter(1, config, state), layers, (), 24, torch.float32, dora=True)


def test_the_engines_reason_is_given(layers: ModelLayers, embedded: Adapter):
    why = {"embed_tokens": "it is tied"}
    with pytest.raises(AdapterError, match=r"no adapter on 'model.embed_tokens' \(it is tied\); it does on"):
        layout(embedded, layers, SERVED, 24, torch.float32, unserved=why)


def test_an_adapter_like_the_last_is_checked_again_where_it_differs(layers, adapter: MakeAdapter):
    checker = Checker(lambda adapter: layout(adapter, layers, SERVED, 24, torch.float32))
    first = checker.layout(adapter(1))
    assert checker.layout(adapter(2)) is first
    mine = adapter(3)
    mine.config.lora_alpha *= 3
    assert [p.scale / q.scale for p, q in zip(checker.layout(mine).parts, first.parts, strict=True)] == [
        3
    ] * 14
    mine.config.use_dora = True  # the config that was checked last, changed since
    with pytest.raises(AdapterError, match="DoRA"):
        checker.layout(mine)
    with pytest.raises(AdapterError, match="make it"):
        checker.layout(with_tensor(adapter(4), Q, torch.zeros(8, 7)))


def test_a_rank_above_the_maximum_names_it(check, adapter: MakeAdapter):
    with pytest.raises(RankError, match="rank 25 is above 24, .*start it with max_lora_rank=25 or more"):
        check(adapter(rank=25))


def test_a_module_that_the_engine_skips_is_refused(layers, adapter: MakeAdapter):
    with pytest.raises(AdapterError, match="puts no adapter on .*it does on q_proj"):
        layout(adapter(), layers, ["q_proj"], 24, torch.float32)


def test_an_overflow_in_the_engines_dtype_is_refused(check, adapter: MakeAdapter):
    mine = with_tensor(adapter(), Q, torch.full((8, 128), 1e6))
    with pytest.raises(AdapterError, match="overflows in torch.float16: its largest value .* 1e"):
        check(mine, torch.float16)
    check(mine, torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "exclude_modules": ["up_proj"]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["down_proj"], "layers_to_transform": [1]},
        {"rank": 64, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 8}},
    ],
)
def test_every_way_to_target_is_read_as_peft_reads_it(check, base_oracle, options):
    config, state = base_oracle.peft_state(
        **{"r": options.get("rank", 4)} | {name: value for name, value in options.items() if name != "rank"}
    )
    plain = check(Adapter(1, config, state))
    assert set(plain.tensors) == set(state)
    assert plain.rank == max(t.shape[0] for n, t in state.items() if "lora_A" in n)
