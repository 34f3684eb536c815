"""Sync over a PEFT folder: vLLM's own loader reads it and replaces the adapter in place."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from ..memory import TMPFS
from ..plain import plain_adapter

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import Adapter

    from ..check import Layout
    from ..plain import PlainAdapter

_TENSORS = "adapter_model.safetensors"


class DiskSync:
    """Writes each adapter to a new folder: on tmpfs where it has room for two, else in ``workdir``."""

    name = "disk"
    in_thread = True
    merges = False

    def __init__(self, workdir: str) -> None:
        self._roots = [Path(tempfile.mkdtemp(prefix="rollproof-", dir=workdir))]
        if os.access(TMPFS, os.W_OK):
            self._roots.insert(0, Path(tempfile.mkdtemp(prefix="rollproof-", dir=TMPFS)))
        self._count = 0
        self._current: Path | None = None

    def prepare(self, adapter: Adapter, layout: Layout) -> PlainAdapter:
        """Copy the numbers to the host."""
        return plain_adapter(adapter, layout)

    def holds(self, prepared: PlainAdapter) -> bool:
        """Compare with the folder."""
        if self._current is None:
            return False
        written = load_file(self._current / _TENSORS)
        return written.keys() == prepared.tensors.keys() and all(
            tensor.equal(written[name]) for name, tensor in prepared.tensors.items()
        )

    async def push(self, engine: AsyncLLM, name: str, int_id: int, prepared: PlainAdapter) -> str:
        """Write the folder, have vLLM load it in place, and delete the one before it."""
        folder = self.next_folder(prepared)
        try:
            await asyncio.to_thread(write_folder, folder, prepared)
            await _load(engine, name, int_id, folder)
        except Exception:
            # vLLM may have removed the old adapter before it failed on the new one.
            await self.restore(engine, name, int_id)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.unloaded()
        self._current = folder
        return str(folder)

    async def restore(self, engine: AsyncLLM, name: str, int_id: int) -> None:
        """Have vLLM read the last folder again."""
        if self._current is not None:
            await _load(engine, name, int_id, self._current)
        else:
            await engine.remove_lora(int_id)

    def next_folder(self, adapter: PlainAdapter) -> Path:
        """A folder that isn't there yet, on the first root that has room for two such adapters."""
        self._count += 1
        size = sum(tensor.numel() * tensor.element_size() for tensor in adapter.tensors.values())
        roomy = [root for root in self._roots if shutil.disk_usage(root).free > 2 * size]
        return (roomy or self._roots[-1:])[0] / str(self._count)

    def unloaded(self) -> None:
        """Delete the folder of the last adapter."""
        if self._current is not None:
            shutil.rmtree(self._current)
            self._current = None

    def close(self) -> None:
        """Delete the folders."""
        for root in self._roots:
            shutil.rmtree(root, ignore_errors=True)


async def _load(engine: AsyncLLM, name: str, int_id: int, folder: Path) -> None:
    # Only this call carries load_inplace: on a generate request vLLM would read the folder again at
    # every step.
    await engine.add_lora(LoRARequest(name, int_id, str(folder), load_inplace=True))


def write_folder(folder: Path, adapter: PlainAdapter) -> None:
    """Write an adapter as a PEFT folder, which must not exist yet."""
    folder.mkdir()
    save_file(adapter.tensors, folder / _TENSORS, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config))
