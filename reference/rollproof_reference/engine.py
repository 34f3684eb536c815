"""Starting vLLM, and whatever differs between its versions on this side of the engine.

With ``worker.py`` and ``fold_worker.py`` this is the only place that touches what vLLM does not document.
It knows no adapter and no rollout.
"""

from __future__ import annotations

import os
import typing
from typing import TYPE_CHECKING, Any

import torch

from .rank import max_lora_rank

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import RolloutSpec

# The ranks vLLM 0.20 to 0.33 allows, for a version that keeps its list elsewhere.
_KNOWN_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def allowed_ranks() -> tuple[int, ...]:
    """The values that the installed vLLM allows for ``max_lora_rank``, ascending."""
    from vllm.config.lora import LoRAConfig

    hint = typing.get_type_hints(LoRAConfig)["max_lora_rank"]
    values = [value for value in typing.get_args(hint) if isinstance(value, int)]
    return tuple(sorted(values)) or _KNOWN_RANKS


def describe(engine: AsyncLLM) -> dict[str, str]:
    """What a report should say of a running engine."""
    import vllm

    config = getattr(engine, "vllm_config", None)
    graphs = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", "unknown")
    lora = getattr(config, "lora_config", None)
    return {
        "engine": f"vLLM {vllm.__version__}",
        "CUDA graphs": str(getattr(graphs, "name", graphs)),
        "max_lora_rank": str(getattr(lora, "max_lora_rank", "none")),
    }


def can_sleep(engine: AsyncLLM) -> bool:
    """Whether it can free the device's memory. On the CPU vLLM's sleep frees nothing, and blocks requests."""
    model = getattr(getattr(engine, "vllm_config", None), "model_config", None)
    return torch.cuda.is_available() and bool(getattr(model, "enable_sleep_mode", False))


def start_engine(spec: RolloutSpec, *, merges: bool = False, **overrides: Any) -> AsyncLLM:
    """Start vLLM for this spec with LoRA enabled, sized for ``spec.max_lora_rank``.

    With ``merges`` LoRA stays off: the adapter is going to be folded into the engine's own weights.

    ``overrides`` go to ``AsyncEngineArgs`` last. Raises FileNotFoundError for a model folder that
    isn't there and RankError for a rank that vLLM can't hold, both before anything starts.
    """
    if not os.path.isfile(os.path.join(spec.model_path, "config.json")):
        raise FileNotFoundError(
            f"no model at {spec.model_path!r}: it has to be a Hugging Face folder with a config.json"
        )
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # vLLM reads it in the engine's process; its own default is 4 GiB of KV.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    args: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "seed": spec.seed,
        "skip_tokenizer_init": True,
        "logprobs_mode": "raw_logprobs",
        "enforce_eager": not on_gpu,
        "gpu_memory_utilization": 0.5,
        "disable_log_stats": True,
    }
    if merges:
        args["worker_extension_cls"] = "rollproof_reference.fold_worker.FoldWorker"
    else:
        args |= {
            "worker_extension_cls": "rollproof_reference.worker.AdapterWorker",
            "enable_lora": True,
            # On the CPU vLLM marks a request without adapter as slot -1 and indexes the last slot with it
            # (vllm/lora/ops/torch_ops), so the last one has to stay empty: base requests in a batch with
            # adapter requests would get the adapter.
            "max_loras": 1 if on_gpu else 2,
            "max_lora_rank": max_lora_rank(spec.max_lora_rank),
        }
    args |= overrides
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
