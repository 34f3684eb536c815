"""The merged-weight model: what a rollout should have sampled from.

transformers with PEFT's own merge, in float32, teacher-forced on the tokens that came back. Base
weights and adapters are first rounded to the rollout's dtype, since that is what it computes with.
The oracle knows no rollout and shares no code with one.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .candidates import BASE, Candidate, Mixed
from .protocol import Adapter

LAMBDAS = torch.tensor([-8.0, -4.0, -2.0, -1.0, -0.5, -0.25, -0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8])
"""Where the log moment generating function of the surprisal is taken (see ``Scores``)."""


_KEPT = 8
_KEPT_BYTES = 16 << 30
"""Merged versions are kept for the next claim: so many, and of so many bytes together."""


def kept_versions(size: int) -> int:
    """How many merged versions are kept of a model of so many bytes."""
    return max(1, min(_KEPT, _KEPT_BYTES // size))


class ModelError(ValueError):
    """A model folder that can't be read. The message is one line."""


@dataclass(frozen=True)
class Sample:
    """A prompt and the tokens that a rollout, or the oracle itself, gave for it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    temperature: float = 0.0


@dataclass(frozen=True)
class Scores:
    """One model's view of the T tokens of a sequence; float32 tensors on the CPU, in nats.

    ``logprobs`` [T]: of each token. ``top`` [T]: of the likeliest token. ``top_ids`` [T]: that token.
    For sampled sequences ``surprise`` [T] is -log q(token) minus the entropy, under the
    distribution q at the sequence's temperature, and ``log_mgf`` [T, len(LAMBDAS)] is
    log E_q exp(lambda * surprise), exact over the whole vocabulary.
    """

    logprobs: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor
    surprise: torch.Tensor | None = None
    log_mgf: torch.Tensor | None = None


class Oracle:
    """The base model and every adapter version it was given, each able to score tokens."""

    def __init__(self, model_path: str | Path, dtype: torch.dtype, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self.device = torch.device(device)
        if not Path(model_path, "config.json").is_file():
            raise ModelError(
                f"no model at '{model_path}': --model has to be a Hugging Face folder with a config.json"
            )
        try:
            model = AutoModelForCausalLM.from_pretrained(str(model_path), dtype=dtype, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"no model can be read from '{model_path}': {error}") from error
        try:
            model = model.eval().requires_grad_(False).to(self.device)
        except (AssertionError, RuntimeError) as error:
            raise ModelError(f"the oracle can't run on {device!r}: {error}") from error
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the fast ones know no float64
        self._base = _in_dtype(model, torch.float32)
        self.vocab_size = int(self._base.config.vocab_size)
        self.depth = int(self._base.config.num_hidden_layers)
        self._adapters: dict[int, Adapter] = {}
        self._weights = {BASE: ""}
        self._merged: OrderedDict[int, Any] = OrderedDict()

    @property
    def versions(self) -> list[int]:
        """Every candidate: the base model, then the adapters in the order they came."""
        return [BASE, *self._adapters]

    @property
    def distinct(self) -> list[int]:
        """The candidates whose weights none before them has."""
        return [version for version in self.versions if self.alike(version) == version]

    def digest(self, version: int) -> str:
        """What tells the weights of a candidate from those of others."""
        return self._weights[version]

    def alike(self, version: int) -> int:
        """The first candidate with the weights of this one: they can't be told apart by any output."""
        return next(other for other in self.versions if self._weights[other] == self._weights[version])

    def layers(self) -> dict[str, torch.Tensor]:
        """The weight [out, in] of every linear layer, by name: without the output layer and experts."""
        output = self._base.get_output_embeddings()
        return {
            name: module.weight
            for name, module in self._base.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not output and ".experts." not in name
        }

    def embedding(self) -> dict[str, torch.Tensor]:
        """The embedding's weight as PEFT sees it, [hidden, vocabulary], by its name."""
        module = self._base.get_input_embeddings()
        return {self._name(module): module.weight.T}

    def head(self) -> dict[str, torch.Tensor]:
        """The output layer's weight [vocabulary, hidden], by its name."""
        return {self.output_layer: self._base.get_output_embeddings().weight}

    def experts(self) -> dict[str, torch.Tensor]:
        """The weights [experts, out, in] of a mixture of experts, by the parameters' names.

        transformers 5 keeps experts so; before that they were linear layers, which this doesn't list.
        """
        return {
            name: parameter
            for name, parameter in self._base.named_parameters()
            if ".experts." in name and parameter.ndim == 3
        }

    def biased_leaves(self) -> list[str]:
        """The last name parts of linear layers that have a bias."""
        modules = dict(self._base.named_modules())
        leaves = {name.rpartition(".")[2] for name in self.layers() if modules[name].bias is not None}
        return sorted(leaves)

    @property
    def output_layer(self) -> str:
        """The name of the layer that gives the logits."""
        return self._name(self._base.get_output_embeddings())

    def _ends(self) -> list[str]:
        return [*self.embedding(), self.output_layer]

    def _name(self, wanted: Any) -> str:
        return next(str(name) for name, module in self._base.named_modules() if module is wanted)

    def peft_state(self, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """A LoraConfig with these options, and the state that PEFT would save for it, on the CPU."""
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

        config = LoraConfig(task_type="CAUSAL_LM", **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT takes a bias for a shard of a matrix
            model = get_peft_model(copy.deepcopy(self._base), copy.deepcopy(config))
            state = get_peft_model_state_dict(model, save_embedding_layers=False)
        return config, {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def add(self, adapter: Adapter) -> None:
        """Learn a version. Its tensors are copied, rounded to the rollout's dtype."""
        if adapter.version <= BASE:
            raise ValueError(f"an adapter's version is at least 1, not {adapter.version}")
        rounded = {
            name: tensor.detach().to(self.device, self.dtype, copy=True).float()
            for name, tensor in adapter.tensors.items()
        }
        kept = Adapter(adapter.version, copy.deepcopy(adapter.config), rounded)
        self._adapters[adapter.version] = kept
        self._weights[adapter.version] = "" if _is_inert(kept) else kept.digest()
        self._merged.pop(adapter.version, None)

    def forget(self, version: int) -> None:
        """Drop a version."""
        self._adapters.pop(version, None)
        self._merged.pop(version, None)

    @torch.inference_mode()
    def score(self, candidate: Candidate, sequences: Sequence[Sample]) -> list[Scores]:
        """Each sequence under one candidate, in float32. A mix is replayed as an engine computes it."""
        mix = candidate if isinstance(candidate, Mixed) else Mixed(((candidate, 0),))
        models = [(self._model(version), first) for version, first in mix.parts]
        found = self._logits(models, sequences, mix.recomputed)
        return [_reduce(logits, sequence) for sequence, logits in zip(sequences, found, strict=True)]

    @torch.inference_mode()
    def tails(
        self, version: int, sequences: Sequence[Sample], nucleus: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each token: how likely one beyond the nucleus was, and whether it is one (both [T]).

        The nucleus is the fewest likeliest tokens that have at least this probability together, at the
        sequence's temperature.
        """
        found = []
        alone = [(self._model(version), 0)]
        for sequence, logits in zip(sequences, self._logits(alone, sequences), strict=True):
            q = (logits.float() / sequence.temperature).softmax(-1)
            ranked = q.sort(-1, descending=True).values
            beyond = ranked.cumsum(-1) - ranked >= nucleus
            own = q.gather(-1, torch.tensor(sequence.tokens, device=q.device)[:, None])
            rank = (q > own).sum(-1, keepdim=True)
            found.append(((ranked * beyond).sum(-1).cpu(), beyond.gather(-1, rank)[:, 0].cpu()))
        return found

    @torch.inference_mode()
    def noise(self, version: int, sequences: Sequence[Sample]) -> list[torch.Tensor]:
        """What computing in the rollout's dtype does to each token's logprob: [2, T] per sequence.

        Row 0 is the merged model's error, row 1 that of base plus adapter kept apart, which is how
        engines serve it. The truth is float32, or float64 for a float32 rollout.
        """
        if self.dtype == torch.float32:
            exact = _in_dtype(copy.deepcopy(self._model(version)), torch.float64)
            noisy = [self._model(version), self.unmerged(version)]
        else:
            exact = self._model(version)
            noisy = [_in_dtype(m, self.dtype) for m in (copy.deepcopy(exact), self.unmerged(version))]
        truth, *found = [self.logprobs(model, sequences) for model in (exact, *noisy)]
        return [torch.stack([row[i] - truth[i] for row in found]).float() for i in range(len(sequences))]

    @torch.inference_mode()
    def logprobs(self, model: Any, sequences: Sequence[Sample]) -> list[torch.Tensor]:
        """Each token's logprob under a model that this oracle made: [T] per sequence."""
        found = self._logits([(model, 0)], sequences)
        return [_token_logprobs(row, s) for row, s in zip(found, sequences, strict=True)]

    @torch.inference_mode()
    def sample(
        self,
        version: int,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int,
        temperature: float | Sequence[float] = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[Sample]:
        """Complete prompts of one length with the merged model itself, at one temperature or one for each."""
        each = temperature if isinstance(temperature, Sequence) else [temperature] * len(prompts)
        drawn = [row for row, one in enumerate(each) if one > 0]
        heat = torch.tensor(each, device=self.device)[drawn, None]
        model = self._model(version)
        step = torch.tensor(prompts, device=self.device)
        cache, columns = None, []
        for _ in range(max_tokens):
            output = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[:, -1]
            step = logits.argmax(-1, keepdim=True)
            if drawn:
                step[drawn] = _draw(logits[drawn].float() / heat, generator)
            columns.append(step)
        tokens = torch.cat(columns, 1).tolist()
        return [Sample(p, tuple(t), one) for p, t, one in zip(prompts, tokens, each, strict=True)]

    def _logits(
        self, models: Sequence[tuple[Any, int]], sequences: Sequence[Sample], recomputed: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """[T, vocab] for the positions that predict each sequence's tokens, on the device.

        ``models`` are (model, first position it computes); each goes on from the KV of those before, or
        computes it anew where its first position is in ``recomputed``.
        """
        found: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, sequence in enumerate(sequences):
            groups.setdefault((len(sequence.prompt), len(sequence.tokens)), []).append(index)
        for (n_prompt, n_tokens), members in groups.items():
            rows = [[*sequences[i].prompt, *sequences[i].tokens] for i in members]
            ids, cache, pieces = torch.tensor(rows, device=self.device), None, []
            ends = [first for _, first in models[1:]] + [n_prompt + n_tokens]
            for (model, first), end in zip(models, ends, strict=True):
                kept = min(end - first, end - n_prompt + 1)  # none is told as one and dropped: 0 means all
                anew = first in recomputed
                output = model(
                    input_ids=ids[:, 0 if anew else first : end],
                    past_key_values=None if anew else cache,
                    use_cache=len(models) > 1,
                    logits_to_keep=max(1, kept),
                )
                cache = output.past_key_values
                pieces.append(output.logits[:, -kept:] if kept > 0 else output.logits[:, :0])
            logits = torch.cat(pieces, 1)
            for row, index in enumerate(members):
                found[index] = logits[row, :-1]
        return found

    def _model(self, version: int) -> Any:
        if version == BASE:
            return self._base
        if version in self._merged:
            self._merged.move_to_end(version)
            return self._merged[version]
        merged = self._peft(version).merge_and_unload(safe_merge=True)
        self._merged[version] = merged
        size = sum(p.numel() * p.element_size() for p in merged.parameters())
        while len(self._merged) > kept_versions(size):
            self._merged.popitem(last=False)
        return merged

    def unmerged(self, version: int) -> Any:
        """A model of its own in float32, with the adapter beside the base weights, as PEFT keeps it."""
        return copy.deepcopy(self._base) if version == BASE else self._peft(version)

    def _peft(self, version: int) -> Any:
        from peft import get_peft_model, set_peft_model_state_dict

        adapter = self._adapters[version]
        base = copy.deepcopy(self._base)
        if any(
            f".{name.rpartition('.')[2]}.lora_" in tensor
            for name in self._ends()
            for tensor in adapter.tensors
        ):
            _untie(base)
        # Its first A and B would be drawn only to be replaced.
        model = get_peft_model(base, copy.deepcopy(adapter.config), low_cpu_mem_usage=True).eval()
        loaded = set_peft_model_state_dict(model, dict(adapter.tensors), low_cpu_mem_usage=True)
        lost = [name for name in loaded.missing_keys if ".lora_" in name]
        if loaded.unexpected_keys or lost:
            raise ValueError(f"PEFT places not all of version {version}: {loaded.unexpected_keys or lost}")
        return model


def _is_inert(adapter: Adapter) -> bool:
    """Whether it is A and B alone, and every B is zero: the base model, as a LoRA begins its training."""
    halves = [name for name in adapter.tensors if name.endswith((".lora_A.weight", ".lora_B.weight"))]
    bs = [adapter.tensors[name] for name in halves if name.endswith(".lora_B.weight")]
    return len(halves) == len(adapter.tensors) and len(bs) > 0 and not any(bool(b.any()) for b in bs)


def _untie(model: Any) -> None:
    """Give the output layer a weight of its own. Merging into a tied one would change both ends."""
    output = model.get_output_embeddings()
    if output.weight is model.get_input_embeddings().weight:
        output.weight = torch.nn.Parameter(output.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The weights in another dtype. Buffers stay: engines keep rotary frequencies in float32 too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _draw(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """A token [rows, 1] of each row's distribution: a random number a row, looked up in its running sum.

    A generator is bound to its device, so that numbers for the whole vocabulary would cost more than a
    large model's forward pass: drawn on the CPU, or with the logits brought there.
    """
    total = logits.double().softmax(-1).cumsum(-1)
    at = torch.rand(len(total), 1, dtype=total.dtype, generator=generator).to(total.device)
    return torch.searchsorted(total, at * total[:, -1:], right=True)


def _token_logprobs(logits: torch.Tensor, sequence: Sample) -> torch.Tensor:
    precise = logits if logits.dtype == torch.float64 else logits.float()
    tokens = torch.tensor(sequence.tokens, device=logits.device)
    return precise.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu()


def _reduce(logits: torch.Tensor, sequence: Sample) -> Scores:
    full = logits.float().log_softmax(-1)
    tokens = torch.tensor(sequence.tokens, device=full.device)[:, None]
    top, top_ids = full.max(-1)
    scores = Scores(full.gather(-1, tokens)[:, 0].cpu(), top.cpu(), top_ids.cpu())
    if sequence.temperature == 0:
        return scores
    log_q = (logits.float() / sequence.temperature).log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1)
    surprise = -log_q.gather(-1, tokens)[:, 0] - entropy
    # E exp(lam * (-log q - H)) = sum over v of q_v^(1 - lam) * exp(-lam * H)
    log_mgf = torch.stack(
        [torch.logsumexp((1 - lam) * log_q, -1) - lam * entropy for lam in LAMBDAS.tolist()], -1
    )
    return Scores(scores.logprobs, scores.top, scores.top_ids, surprise.cpu(), log_mgf.cpu())
