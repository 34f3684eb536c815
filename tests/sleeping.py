"""Workers for test_sleep.py, which the engine imports by name."""

from __future__ import annotations

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from rollproof_reference.worker import AdapterWorker


class Forgetful(AdapterWorker):
    """Can lose its base weights, as a deep sleep does on a GPU."""

    def forget_weights(self) -> None:
        with torch.inference_mode():
            for parameter in self.model_runner.get_model().parameters():
                parameter.zero_()


class Older(Forgetful):
    """Runs where the layers that LoRA wraps can't load weights, as in vLLM before 0.28."""

    def forget_weights(self) -> None:
        super().forget_weights()
        if hasattr(BaseLayerWithLoRA, "load_weights"):
            del BaseLayerWithLoRA.load_weights
