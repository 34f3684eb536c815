"""An engine without LoRA, as one that serves merged weights is, and a push of all its weights."""

from __future__ import annotations

import base64
import itertools
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from rollproof.protocol import Completion, GenerateRequest, RolloutSpec
from rollproof_reference import start_engine
from rollproof_reference.sampling import completions, sampling_params
from rollproof_reference.start import as_value

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Plain:
    """Streams completions of the base model."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self._ids = itertools.count()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """One completion in pieces."""
        asked = replace(request, route="stream")
        prompt: Any = {"prompt_token_ids": list(request.prompt_token_ids)}
        async for output in self.engine.generate(prompt, sampling_params(asked), f"plain-{next(self._ids)}"):
            (piece,) = completions([output], None)
            yield piece


@asynccontextmanager
async def make(spec: RolloutSpec, **options: str) -> AsyncIterator[Plain]:
    """An engine without LoRA on weights that it makes up; further options as for the reference."""
    engine = start_engine(
        spec, enable_lora=False, load_format="dummy", **{key: as_value(text) for key, text in options.items()}
    )
    try:
        yield Plain(engine)
    finally:
        engine.shutdown()


class FullPush:
    """Every weight of a model in the trainer's memory, sent by vLLM's own weight transfer over CUDA IPC.

    The engine has to be started with ``weight_transfer_config={"backend": "ipc"}``, and vLLM takes
    handles from another process only with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
    """

    def __init__(self, engine: AsyncLLM, model_path: str, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.engine = engine
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path), dtype=dtype)
        self._weights = {
            name: torch.empty(parameter.shape, dtype=dtype, device="cuda").normal_(std=0.01)
            for name, parameter in model.named_parameters()
        }

    @property
    def bytes(self) -> int:
        """What one push moves."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())

    async def push(self) -> None:
        """Have the engine serve the weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        share: Any = reduce_tensor
        handles = [{uuid: share(tensor)[1]} for tensor in self._weights.values()]
        await self.engine.start_weight_update()
        await self.engine.update_weights(
            WeightTransferUpdateRequest(
                update_info={
                    "names": list(self._weights),
                    "dtype_names": [str(t.dtype).removeprefix("torch.") for t in self._weights.values()],
                    "shapes": [list(tensor.shape) for tensor in self._weights.values()],
                    "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
                }
            )
        )
        await self.engine.finish_weight_update()
