"""Made families, and adapters beyond the linear layers: embedding, output layer, experts. No engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

import toy
from rollproof import Capability, Outcome, Settings, check_rollout
from rollproof.models import SHAPES, make_adapter, make_model
from rollproof.oracle import BASE, Oracle, Sample
from rollproof.protocol import Adapter, RolloutSpec
from rollproof.settings import MADE, SettingsError

TINY = [name for name in MADE if name.startswith("tiny-")]
SAMPLES = [Sample(tuple(range(5 + i, 29 + i)), tuple(range(100 + i, 108 + i))) for i in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """``made(shape)``: the folder of a made model, made once."""
    folder = tmp_path_factory.mktemp("families")

    def make(shape: str) -> Path:
        return folder / shape if (folder / shape).exists() else make_model(folder / shape, shape)

    return make


def test_every_made_model_can_be_named():
    assert tuple(SHAPES) == MADE
    with pytest.raises(
        SettingsError, match="or a model made on the spot: tiny-qwen2, tiny-llama, tiny-qwen3"
    ):
        Settings(model="tiny-gpt")


@pytest.mark.parametrize("shape", TINY)
def test_every_family_is_peaked_and_follows_its_context(made, shape: str):
    oracle = Oracle(made(shape), torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, oracle.vocab_size, (8, 64), generator=generator)
    with torch.inference_mode():
        logprobs = oracle._base(ids).logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
    assert 1 < entropy < 3
    top = logprobs.topk(2, -1).values
    assert (top[..., 0] - top[..., 1]).median() > 0.3
    assert (logprobs.argmax(-1) == ids).float().mean() < 0.1  # a tied model could repeat its input
    greedy = oracle.sample(BASE, [tuple(row) for row in ids[:, :24].tolist()], 32)
    assert sum(len(set(sample.tokens)) for sample in greedy) / len(greedy) > 10


@torch.inference_mode()
def logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt, *sample.tokens]])
    found = model(ids).logits[0].log_softmax(-1)[len(sample.prompt) - 1 : -1]
    return found.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]


@pytest.mark.parametrize("end", ["embedding", "head"])
def test_a_tied_end_is_untied_before_the_merge(made, end: str):
    """The merged model is the one that PEFT computes with the adapter kept apart."""
    oracle = Oracle(made("tiny-gemma3"), torch.float32)
    weights = oracle.embedding() if end == "embedding" else oracle.head()
    generator = torch.Generator().manual_seed(3)
    adapter = make_adapter(weights, 1, generator, strength=0.5, embedding=end == "embedding")
    oracle.add(adapter)
    scores = oracle.score(1, SAMPLES)
    apart = oracle.unmerged(1)
    for sample, score, base in zip(SAMPLES, scores, oracle.score(BASE, SAMPLES), strict=True):
        torch.testing.assert_close(score.logprobs, logprobs(apart, sample), atol=1e-3, rtol=0)
        assert (score.logprobs - base.logprobs).abs().max() > 0.1
    embedded = oracle._base.get_input_embeddings()
    assert oracle._base.get_output_embeddings().weight is embedded.weight


def test_an_adapter_on_the_embedding_adds_its_product(made):
    oracle = Oracle(made("tiny-llama"), torch.float32)
    generator = torch.Generator().manual_seed(3)
    adapter = make_adapter(oracle.embedding(), 1, generator, strength=0.5, embedding=True)
    oracle.add(adapter)
    a, b = adapter.tensors.values()
    assert [name.rpartition(".")[2] for name in adapter.tensors] == ["lora_embedding_A", "lora_embedding_B"]
    expected = oracle._base.get_input_embeddings().weight + 2 * (b @ a).T
    torch.testing.assert_close(oracle._model(1).get_input_embeddings().weight, expected)


def test_fused_experts_are_no_layers_and_are_listed_apart(made):
    oracle = Oracle(made("tiny-qwen3-moe"), torch.float32)
    assert {name.rpartition(".")[2] for name in oracle.layers()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    shapes = {name: tuple(weight.shape) for name, weight in oracle.experts().items()}
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (4, 256, 128)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (4, 128, 128)
    assert not Oracle(made("tiny-qwen3"), torch.float32).experts()


def routes(model: torch.nn.Module, samples: list[Sample]) -> torch.Tensor:
    """The experts that each layer chooses for each token of the samples: [layers, tokens, k], in order."""
    found: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [r.register_forward_hook(lambda _, __, out: found.append(out[2].sort().values)) for r in routers]
    with torch.inference_mode():
        model(torch.tensor([[*sample.prompt, *sample.tokens] for sample in samples]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_go_to_unlike_experts_that_rounding_does_not_flip(tmp_path: Path, seed: int):
    oracle = Oracle(make_model(tmp_path, "tiny-qwen3-moe", seed), torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    oracle.add(make_adapter(oracle.layers(), 1, generator, strength=0.5))
    prompts = [tuple(row) for row in torch.randint(0, 1024, (16, 24), generator=generator).tolist()]
    for version in (BASE, 1):
        samples = oracle.sample(version, prompts, 16, 1.0, generator)
        model = oracle.unmerged(version)
        exact = routes(model, samples)
        assert exact.shape == (2, 16 * 40, 2)
        for layer in exact:
            assert len(layer.unique(dim=0)) == 6, "every pair of experts"
        assert routes(model.to(torch.bfloat16), samples).equal(exact)


class Ends(toy.Toy):
    """Serves embeddings, output layers and experts; ``fault`` loses them or takes the wrong expert."""

    capabilities = toy.Toy.capabilities | {Capability.EMBED_TOKENS, Capability.LM_HEAD, Capability.EXPERTS}

    async def update_adapter(self, adapter: Adapter) -> None:
        plain = self._model
        if self.fault in ("loses", "next-expert"):
            self._model = Faulty(plain, self.fault)  # type: ignore[assignment]
        try:
            await super().update_adapter(adapter)
        finally:
            self._model = plain


class Faulty:
    """An oracle that learns adapters otherwise than they came."""

    def __init__(self, inner: Oracle, fault: str) -> None:
        self._inner, self._fault = inner, fault

    def add(self, adapter: Adapter) -> None:
        tensors = {}
        for name, tensor in adapter.tensors.items():
            special = any(part in name for part in ("embed_tokens", "lm_head", "experts"))
            if special and (".lora_B." in name or "embedding_B" in name):
                tensor = tensor * 0 if self._fault == "loses" else tensor.roll(1, -1)
            tensors[name] = tensor
        self._inner.add(Adapter(adapter.version, adapter.config, tensors))

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    ("shape", "fault", "fails"),
    [
        ("tiny-llama", "", set()),
        ("tiny-gemma3", "", set()),
        ("tiny-qwen3-moe", "", set()),
        ("tiny-llama", "loses", {"NUM-007", "NUM-008"}),
        ("tiny-qwen3-moe", "loses", {"NUM-007", "NUM-008", "NUM-009"}),
        ("tiny-qwen3-moe", "next-expert", {"NUM-007", "NUM-008", "NUM-009"}),
    ],
)
async def test_ends_and_experts_are_judged(made, shape: str, fault: str, fails: set[str]):
    @asynccontextmanager
    async def start(spec: RolloutSpec) -> AsyncIterator[Ends]:
        yield Ends(spec, fault)

    settings = Settings(model=str(made(shape)), only=("NUM-007", "NUM-008", "NUM-009"))
    report = await check_rollout(start, settings)
    told = {result.clause: result.message for result in report.results}
    assert report.outcomes(Outcome.FAIL, Outcome.ERROR) == fails, told
    assert report.outcomes(Outcome.NOT_APPLICABLE) == (set() if "moe" in shape else {"NUM-009"}), told
    if fault == "loses":
        assert "these logprobs are those of the base model" in told["NUM-007"]
        assert "an adapter on lm_head alone" in told["NUM-008"]
