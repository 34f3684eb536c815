"""What a rollout provides so that it can be judged, and the plain values that cross that border.

Nothing here knows an inference engine, a model or how an adapter travels: the rollout chooses that.
The protocol is structural: no base class, no import of this package, is needed to satisfy it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig


class Capability(StrEnum):
    """What a rollout says it can do. Undeclared: not applicable. Declared but absent: a failure."""

    BASE = "base"
    """``adapter=False`` is answered by the base model."""
    BASE_BEFORE_SYNC = "base-before-sync"
    """Before the first update ``adapter=True`` is answered by the base model; undeclared, it raises."""
    LOGPROBS = "logprobs"
    """Completions carry the logprob of each token, before temperature and truncation."""
    PREFIX_CACHE = "prefix-cache"
    """KV of a repeated prompt is reused, and completions carry ``num_cached_tokens``."""
    INVENTORY = "inventory"
    """``loaded_adapters()`` lists what the engine holds."""
    STABLE_ID = "stable-id"
    """One adapter name and int id for the life of the rollout."""
    VERSIONED_ID = "versioned-id"
    """A new (name, int id) pair for every update, never used twice."""
    FINISH_ON_OLD = "finish-on-old"
    """A request in flight during an update is finished with the version it began with."""
    CONTINUE_MIXED = "continue-mixed"
    """It goes on with the new weights, on the KV it has or on KV computed anew."""
    RESTART = "restart"
    """It is begun again, and all of its tokens are the new version's."""
    ABORT_IN_FLIGHT = "abort-in-flight"
    """It raises, or comes back with the tokens it had and ``finish_reason`` "abort"."""
    CANCEL = "cancel"
    """Cancelling the task that awaits ``generate`` ends the request in the engine too."""
    ROUTES = "routes"
    """Requests can enter in several ways, which the attribute ``routes`` names: API paths, replicas."""
    SAMPLES = "samples"
    """``generate_n(request, n)`` gives several completions of one prompt."""
    PROMPT_LOGPROBS = "prompt-logprobs"
    """``prompt_logprobs(request)`` scores the tokens of a prompt."""
    UNLOAD = "unload"
    """``unload_adapter()`` goes back to the time before the first update."""
    SLEEP = "sleep"
    """``sleep(level)`` and ``wake()`` free the device's memory between two steps of training."""
    COUNTERS = "counters"
    """``counters()`` says what updates and generation cost so far."""
    PROCESSES = "processes"
    """``process_ids()`` names the processes whose memory is the rollout's."""
    EMBED_TOKENS = "embed-tokens"
    """Adapters on the embedding are served."""
    LM_HEAD = "lm-head"
    """Adapters on the output layer are served."""
    EXPERTS = "experts"
    """Adapters on the experts of a mixture-of-experts model are served."""


IN_FLIGHT = (
    Capability.FINISH_ON_OLD,
    Capability.CONTINUE_MIXED,
    Capability.RESTART,
    Capability.ABORT_IN_FLIGHT,
)
"""What may become of a request in flight during an update. A rollout declares one, or none."""


@dataclass(frozen=True)
class RolloutSpec:
    """What the kit asks of a rollout it starts. A rollout attached to a running system may honour
    something else and say so in its ``spec`` attribute, which is then what it is judged by.

    ``dtype`` is "float32", "bfloat16" or "float16"; ``max_lora_rank`` is the highest rank that must
    be accepted (not the engine's rounded value); ``max_model_len`` is in tokens, prompt and
    completion together; ``workdir`` is an existing folder that the rollout may write to.
    """

    model_path: str
    dtype: str = "float32"
    max_lora_rank: int = 24
    max_model_len: int = 1024
    max_num_seqs: int = 16
    seed: int = 0
    workdir: str = "."


@dataclass(frozen=True)
class Adapter:
    """One version of the policy's adapter, as the trainer holds it.

    ``tensors`` maps PEFT's names (``base_model.model.<module>.lora_A.weight`` of shape [rank, in],
    ``...lora_B.weight`` of shape [out, rank]) to floating-point tensors on any device. ``version``
    never shrinks; the same version with the same tensors is a no-op, with others an error.
    """

    version: int
    config: LoraConfig
    tensors: Mapping[str, torch.Tensor]

    def save(self, folder: str | Path) -> Path:
        """Write ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT does; return the folder."""
        from safetensors.torch import save_file

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(str(path))
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()},
            path / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        return path

    @classmethod
    def load(cls, folder: str | Path, version: int) -> Adapter:
        """Read a folder as ``save`` or PEFT writes it. Raises FileNotFoundError or ValueError."""
        from peft import PeftConfig
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not Path(folder, file).is_file():
                raise FileNotFoundError(f"{folder} has no {file}: it is not a PEFT adapter's folder")
        try:
            config = PeftConfig.from_pretrained(str(folder))
            return cls(version, config, load_file(Path(folder, "adapter_model.safetensors")))
        except (SafetensorError, TypeError, KeyError) as error:
            raise ValueError(f"no adapter can be read from {folder}: {error}") from error

    def digest(self) -> str:
        """SHA-256 (hex) of the config and every tensor's name, dtype, shape and bytes, as they are now.

        It is the same for what ``save`` wrote: of the config only what isn't PEFT's default counts, and
        nothing that says merely where the adapter comes from.
        """
        import torch

        usual, config = type(self.config)().to_dict(), self.config.to_dict()
        chosen = {k: v for k, v in config.items() if k not in _ORIGIN and v != usual.get(k)}
        sha = hashlib.sha256(json.dumps(chosen, default=_plain, sort_keys=True).encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.flatten().view(torch.uint8).numpy().data)
        return sha.hexdigest()


_ORIGIN = {"base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version"}
"""What an adapter's config says that changes no output."""


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to complete with exactly ``max_tokens`` tokens.

    Sampling is from the model's own distribution at ``temperature`` (0: greedy): no top-p, top-k,
    penalties or stop strings, and the end-of-sequence token is a token like any other. A rollout
    that has to stop there says so in ``finish_reason``. ``adapter`` False asks the base model.
    ``route`` is one of the rollout's ``routes``; "default" for those that declare none.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    adapter: bool = True
    route: str = "default"

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Completion:
    """What came back for a request.

    ``logprobs`` (nats, one per token) are the model's before temperature and truncation.
    ``finish_reason`` is "length", "stop" or "abort". ``num_cached_tokens`` counts prompt tokens
    whose KV was reused. ``version_spans`` lists (index of the first token, version).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    finish_reason: str = "length"
    num_cached_tokens: int | None = None
    version_spans: tuple[tuple[int, int], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The completion as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class LoadedAdapter:
    """One adapter that the engine holds now. ``int_id`` is 0 where the engine doesn't show it."""

    name: str
    int_id: int
    rank: int | None = None


class Rollout(Protocol):
    """A rollout under test.

    When ``update_adapter`` returns, every later request is served by the new version; when it
    raises, the old one still serves. Optional attributes: ``spec`` (the RolloutSpec it honoured),
    ``inventory_bound`` (the most adapters of its own it keeps loaded; 1 when absent), ``routes``
    (what ``GenerateRequest.route`` may be), ``sleep_levels`` ((1, 2) when absent) and ``details``
    (a mapping of names to values that go into the report: engine, parallelism, graphs, ...).

    What a rollout declares beyond that it provides by a method of its own; see ``Optional``.
    """

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the rollout declares."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Complete one prompt. Many may run at once, beside updates too."""
        ...

    async def update_adapter(self, adapter: Adapter) -> None:
        """Serve this adapter from now on, or raise and change nothing."""
        ...

    async def loaded_adapters(self) -> Sequence[LoadedAdapter]:
        """The adapters of this rollout that the engine holds now; not those that others loaded."""
        ...


class Optional(Protocol):
    """The methods that go with capabilities. A rollout has those that it declares, and no others."""

    async def generate_n(self, request: GenerateRequest, n: int) -> Sequence[Completion]:
        """``samples``: n completions of one prompt, drawn independently at the request's temperature."""
        ...

    async def prompt_logprobs(self, request: GenerateRequest) -> Sequence[float]:
        """``prompt-logprobs``: the logprob of each prompt token but the first, given those before it.

        In nats, under the newest adapter or the base model as the request says; n - 1 numbers for a
        prompt of n tokens. ``max_tokens``, ``temperature`` and ``seed`` don't matter.
        """
        ...

    async def unload_adapter(self) -> None:
        """``unload``: serve as before the first update. The same version may be sent again then."""
        ...

    async def sleep(self, level: int) -> None:
        """``sleep``: free device memory; no request runs. Level 2 may drop the weights too."""
        ...

    async def wake(self) -> None:
        """``sleep``: serve again, exactly what was served before."""
        ...

    async def counters(self) -> Mapping[str, int]:
        """``counters``: what was counted since the start, by any of these names.

        "adapter_reads": how often the engine read or received an adapter's weights;
        "adapter_bytes": how many bytes those were; "engine_steps": forward passes of the model.
        """
        ...

    async def process_ids(self) -> Sequence[int]:
        """``processes``: the ids of the processes on this machine whose memory is the rollout's."""
        ...


class RolloutFactory(Protocol):
    """What ``--rollout pkg.mod:factory,key=value`` names: options arrive as strings."""

    def __call__(self, spec: RolloutSpec, **options: str) -> AbstractAsyncContextManager[Rollout]:
        """Start a rollout for the length of the context."""
        ...
