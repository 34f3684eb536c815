"""How frameworks bring an adapter into vLLM today, each as an ``update_adapter``.

They do what their name says and check nothing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest

from rollproof.protocol import Adapter
from rollproof_reference.memory import TMPFS

if TYPE_CHECKING:
    from rollproof_reference import AsyncRollout

INT_ID = 77


class Baseline:
    """Updates the engine of a running reference rollout in its own way."""

    def __init__(self, running: AsyncRollout) -> None:
        self.engine = running.engine
        self._folder = Path(tempfile.mkdtemp(prefix="rollproof-", dir=TMPFS if TMPFS.is_dir() else None))

    async def update_adapter(self, adapter: Adapter) -> None:
        """Serve the adapter."""
        raise NotImplementedError

    async def unload_adapter(self) -> None:
        """Leave the engine as it was."""
        await self.engine.remove_lora(INT_ID)
        shutil.rmtree(self._folder)


class SaveRemoveAdd(Baseline):
    """Save a PEFT folder to tmpfs, remove the old adapter, add the new one."""

    async def update_adapter(self, adapter: Adapter) -> None:
        """Serve the adapter."""
        adapter.save(self._folder / "adapter")
        await self.engine.remove_lora(INT_ID)
        await self.engine.add_lora(LoRARequest("baseline", INT_ID, str(self._folder / "adapter")))


class SaveLoadInplace(Baseline):
    """Save a PEFT folder to tmpfs, and have vLLM load it in the place of the last."""

    async def update_adapter(self, adapter: Adapter) -> None:
        """Serve the adapter."""
        folder = str(self._folder / "adapter")
        adapter.save(folder)
        await self.engine.add_lora(LoRARequest("baseline", INT_ID, folder, load_inplace=True))


class IpcTensors(Baseline):
    """Send CUDA IPC handles of the trainer's tensors, from which the worker builds vLLM's adapter anew."""

    async def update_adapter(self, adapter: Adapter) -> None:
        """Serve the adapter."""
        handles = bytes(ForkingPickler.dumps(dict(adapter.tensors)))
        await self.engine.collective_rpc(
            "rollproof_ipc_swap",
            args=(INT_ID, json.loads(json.dumps(adapter.config.to_dict(), default=list)), handles),
        )


BASELINES = {"save+remove+add": SaveRemoveAdd, "save+load_inplace": SaveLoadInplace}
"""Those that work everywhere."""

GPU_BASELINES = {"ipc tensors": IpcTensors}
"""Those that need the trainer's tensors on a GPU."""
