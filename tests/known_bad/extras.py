"""Faults at the edges of syncing: other routes, a resumed run, an update without effect, and what goes
beyond one completion at a time."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from vllm.lora.request import LoRARequest

from rollproof.protocol import Adapter, Completion, GenerateRequest, LoadedAdapter
from rollproof_reference import AsyncRollout

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof.protocol import RolloutSpec
    from rollproof_reference.plain import PlainAdapter
    from rollproof_reference.sync import Sync


class DropsItOnOneRoute(AsyncRollout):
    """Hands the adapter on where it waits for the whole, and forgets it where it streams (vllm-omni#5369)."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, adapter=request.adapter and request.route != "stream"))


class OneSampleInFour(AsyncRollout):
    """Sends each sample as a request of its own, and the adapter with the first alone."""

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Completion]:
        first, *others = await super().generate_n(request, n)
        rest = await super().generate_n(replace(request, adapter=False), n) if others else []
        return [first, *rest[1:]]


class CopiesTheSample(AsyncRollout):
    """Gives every sample of a prompt the request's own seed, which makes them one."""

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Completion]:
        return [(await super(CopiesTheSample, self).generate_n(request, 1))[0] for _ in range(n)]


class ScoresTheBase(AsyncRollout):
    """Scores prompts without the adapter that completions are sampled with (vllm#51594)."""

    async def prompt_logprobs(self, request: GenerateRequest) -> list[float]:
        return await super().prompt_logprobs(replace(request, adapter=False))


class TrustsTheCheckpoint(AsyncRollout):
    """Takes the first version of a resumed run for one that the engine has already (verl#3541)."""

    _began = False

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        resumed, self._began = version >= 1000 and not self._began, True
        if resumed:
            self.version = version
        else:
            await super()._commit(version, plain)


class SkipsZero(AsyncRollout):
    """Takes an adapter without effect for one that needs no loading, and serves the last one on."""

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        if self._path and not any(t.any() for name, t in plain.tensors.items() if ".lora_B." in name):
            self.version = version
        else:
            await super()._commit(version, plain)


class RefusesTheSame(AsyncRollout):
    """Holds a new version with the old tensors for a trainer's mistake, and refuses it."""

    def _is_new(self, version: int, prepared: object) -> bool:
        if version != self.version and self.sync.holds(prepared):
            raise ValueError(f"version {version} has the tensors of version {self.version}")
        return super()._is_new(version, prepared)


class UnloadsTheListAlone(AsyncRollout):
    """Takes the adapter off its own list, while its requests go on carrying it (vllm#54839)."""

    _listed = True

    async def unload_adapter(self) -> None:
        self._listed = False

    async def update_adapter(self, adapter: Adapter) -> None:
        await super().update_adapter(adapter)
        self._listed = True

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        return await super().loaded_adapters() if self._listed else []


class KeepsACopy(AsyncRollout):
    """Keeps every adapter that it ever sent, in its own memory (vllm#42207)."""

    def __init__(self, engine: AsyncLLM, spec: RolloutSpec, sync: Sync, served: list[str]) -> None:
        super().__init__(engine, spec, sync, served)
        self._kept: list[PlainAdapter] = []

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await super()._commit(version, plain)
        self._kept.append(plain)


class ScalesAgain(AsyncRollout):
    """Shares the staged tensors with the engine, which scales them in place at every load (SkyRL#2250)."""

    _staged: tuple[int, dict[str, torch.Tensor]] = (0, {})

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        version, tensors = self._staged
        if version == adapter.version:
            adapter = replace(adapter, tensors=tensors)
        plain = super()._prepare(adapter)
        self._staged = adapter.version, plain.tensors
        return plain


class LoadsForEachRequest(AsyncRollout):
    """Has vLLM load the adapter in place for every request, not for every update (vllm#41482)."""

    async def generate(self, request: GenerateRequest) -> Completion:
        # The lock keeps it to that fault: otherwise an update in flight could be undone too.
        async with self._updating:
            if request.adapter and self._path is not None:
                await self.engine.add_lora(
                    LoRARequest(self.lora_name, self.lora_int_id, self._path, load_inplace=True)
                )
        return await super().generate(request)


class FillsUpWithZeros(AsyncRollout):
    """Sends a zero for every module that the adapter leaves out, in the shape of one that it has."""

    def _prepare(self, adapter: Adapter) -> PlainAdapter:
        plain = super()._prepare(adapter)
        tensors = dict(plain.tensors)
        dtype = getattr(torch, self.spec.dtype)
        for module, (n_in, n_out) in self._layers.shapes.items():
            if module.rpartition(".")[2] in self.served:
                for half, shape in (("A", (plain.rank, n_in)), ("B", (n_out, plain.rank))):
                    name = f"base_model.model.{module}.lora_{half}.weight"
                    tensors.setdefault(name, torch.zeros(shape, dtype=dtype))
        return replace(plain, tensors=tensors, target_modules=tuple(sorted(self.served)))


class LogsALoadError(AsyncRollout):
    """Sends what the adapter's folder holds, and calls a broken one an update (aibrix#235)."""

    async def update_adapter(self, adapter: Adapter) -> None:
        folder = tempfile.mkdtemp(dir=self.spec.workdir)
        try:
            tensors = load_file(adapter.save(folder) / "adapter_model.safetensors")
        except (OSError, SafetensorError):
            return
        finally:
            shutil.rmtree(folder)
        await super().update_adapter(replace(adapter, tensors=tensors))


class WakesWithoutTheAdapter(AsyncRollout):
    """Serves the base model to all once it has slept, until the next update (vllm#53888)."""

    async def wake(self) -> None:
        await super().wake()
        self._path = None


class WakesWithoutTheBase(AsyncRollout):
    """Restores the adapter alone after a sleep that dropped the base weights too (verl#3461)."""

    async def wake(self) -> None:
        await self.engine.wake_up()
        await self.sync.restore(self.engine, self.lora_name, self.lora_int_id)
        self._epoch += 1
        self._asleep = 0
