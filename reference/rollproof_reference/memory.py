"""One tensor in two processes: CUDA IPC on a GPU, a file on tmpfs on the host.

Nothing here knows an adapter or an engine.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

TMPFS = Path("/dev/shm")


def local_device(uuid: str) -> torch.device | None:
    """The GPU with this UUID as this process numbers it; None where it doesn't see it."""
    if not uuid or not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    return None


@dataclass
class Shared:
    """A zeroed tensor, and the ``handle`` by which a process on this machine maps it: plain values."""

    tensor: torch.Tensor
    handle: dict[str, Any]

    @classmethod
    def on_gpu(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Shared:
        """On a GPU. The process that maps it has to be one that trusts this one: a handle is a pickle."""
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        return cls(tensor, {"pickled": bytes(ForkingPickler.dumps(tensor))})

    @classmethod
    def on_host(cls, shape: tuple[int, ...], dtype: torch.dtype, folder: str | Path = TMPFS) -> Shared:
        """In a file, on tmpfs where that can be written; ``forget_file`` once it is mapped."""
        where = folder if os.access(folder, os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="rollproof-", dir=where)
        os.close(descriptor)
        handle = {"file": path, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        return cls(mapped(handle).zero_(), handle)

    def forget_file(self) -> None:
        """Remove the name of a file: what is mapped stays, and goes with the last process that maps it."""
        if "file" in self.handle:
            Path(self.handle["file"]).unlink(missing_ok=True)


def mapped(handle: dict[str, Any]) -> torch.Tensor:
    """The tensor of a handle, in this process."""
    if "pickled" in handle:
        tensor = pickle.loads(handle["pickled"])
        assert isinstance(tensor, torch.Tensor)
        return tensor
    shape, dtype = handle["shape"], getattr(torch, handle["dtype"])
    count = torch.Size(shape).numel()
    return torch.from_file(handle["file"], shared=True, size=count, dtype=dtype).view(shape)
