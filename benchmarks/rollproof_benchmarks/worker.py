"""What a benchmark has to see inside the engine's worker: how long the device itself takes to copy."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rollproof_reference.worker import AdapterWorker, built_adapter, replace_adapter


class TimedWorker(AdapterWorker):
    """The reference's worker, with a clock."""

    def rollproof_time_copies(self, rounds: int) -> dict[str, float]:
        """Seconds (medians) of the copy from an arena to where the kernels read, and of the fastest copy
        of as many bytes that this device can make: one tensor into another."""
        (arena,) = (self.rollproof_arenas or {}).values()
        copy = next(iter(arena._copies.values()))
        of = torch.empty(arena.received.bytes, dtype=torch.uint8, device=arena._memory.device)
        to = torch.empty_like(of)
        return {
            "copy": timed(copy, rounds, of.device),
            "floor": timed(lambda: to.copy_(of), rounds, of.device),
            "bytes": float(arena.received.bytes),
        }

    def rollproof_ipc_swap(self, int_id: int, config: dict[str, Any], handles: bytes) -> None:
        """Serve tensors that another process holds on this GPU, by way of vLLM's own loading."""
        manager = self.model_runner.lora_manager
        tensors = pickle.loads(handles)
        # vLLM scales B in place, and these are the trainer's own.
        own = {name: tensor.clone() if ".lora_B." in name else tensor for name, tensor in tensors.items()}
        device = str(next(iter(own.values())).device)
        replace_adapter(manager, built_adapter(manager, int_id, config, own, device))
        torch.cuda.synchronize()


def timed(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The median of how long the device takes, in seconds."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    events = [(event(), event()) for _ in range(rounds)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in events))
