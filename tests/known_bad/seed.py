"""The faults this project grew from: an async rollout whose LoRA updates never reached its samples.

Each is the reference with one thing done as a framework once did it, on the real engine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest

from rollproof.protocol import Capability, Completion, GenerateRequest, LoadedAdapter
from rollproof_reference import AsyncRollout
from rollproof_reference.sync.disk import DiskSync, write_folder

from .flight import FinishesOnOld

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollproof_reference.plain import PlainAdapter

VERSIONED = AsyncRollout.capabilities - {Capability.STABLE_ID} | {Capability.VERSIONED_ID}


class SamplesBase(AsyncRollout):
    """Loads every update and attaches none to its requests (verl#3821)."""

    def _lora_request(self) -> LoRARequest | None:
        return None


class RandomId(FinishesOnOld):
    """Declares one id for life and draws another from the clock at every update (verl#3821)."""

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await self._drained()
        await self.engine.remove_lora(self.lora_int_id)
        self.lora_int_id = time.time_ns() % 0x7FFFFFFF
        self.lora_name = str(self.lora_int_id)
        await super()._commit(version, plain)


class KeepsOld(AsyncRollout):
    """Adds each version under a new id and leaves the eight before it loaded (verl#3821)."""

    # A request in flight goes on with its own version, which is still loaded.
    capabilities = VERSIONED - {Capability.UNLOAD, Capability.CONTINUE_MIXED} | {Capability.FINISH_ON_OLD}
    kept = 8

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        self.lora_int_id += 1
        self.lora_name = f"policy-{self.lora_int_id}"
        await self.engine.remove_lora(max(1, self.lora_int_id - self.kept))
        await super()._commit(version, plain)


class NeverRemoves(DiskSync):
    """Adds every version under the id that is loaded already, so vLLM keeps the first."""

    async def push(self, engine: AsyncLLM, name: str, int_id: int, adapter: PlainAdapter) -> str:
        folder = self.next_folder(adapter)
        write_folder(folder, adapter)
        await engine.add_lora(LoRARequest(name, int_id, str(folder)))
        return str(folder)


class NoLoraConfig(AsyncRollout):
    """Runs on an engine that was started without room for an adapter (verl#3821)."""

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        return []


class StaleKV(AsyncRollout):
    """Replaces the weights under one name and path, and lets the prefix cache be (vllm#42125)."""

    def _cache_salt(self) -> str | None:
        return None


class AnswersTooEarly(AsyncRollout):
    """Samples the base before the first sync, without a word in its capabilities (verl#3541)."""

    capabilities = AsyncRollout.capabilities - {Capability.BASE_BEFORE_SYNC}


class AdapterForBase(AsyncRollout):
    """Attaches the adapter to every request, also to those for the base model."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, adapter=True))


class ReusesAnId(AsyncRollout):
    """Declares a new pair for each version and gives one int id to all of them (AReaL#1193)."""

    capabilities = VERSIONED

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        self.lora_name = f"policy-{version}"
        await super()._commit(version, plain)


class LeaksSlowly(AsyncRollout):
    """Loads a second copy that nobody removes, once in a long run (vllm-metal#641)."""

    capabilities = AsyncRollout.capabilities - {Capability.UNLOAD}
    _updates = 0

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await super()._commit(version, plain)
        self._updates += 1
        if self._updates == 25:
            await self.engine.add_lora(LoRARequest("copy", 99, str(self._path)))
