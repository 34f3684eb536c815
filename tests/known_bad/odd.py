"""Rollouts that are right, and otherwise than the reference: each has to pass whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rollproof.protocol import Adapter, Capability, Completion, GenerateRequest, LoadedAdapter
from rollproof_reference import AsyncRollout
from rollproof_reference.plain import PlainAdapter
from rollproof_reference.sync.tensors import TensorSync

from .case import bad
from .flight import AbortsInFlight, FinishesOnOld, Restarts

if TYPE_CHECKING:
    from .case import Case


class Slow(AsyncRollout):
    """Takes its time before and after every call."""

    async def generate(self, request: GenerateRequest) -> Completion:
        async with _slowly():
            return await super().generate(request)

    async def update_adapter(self, adapter: Adapter) -> None:
        async with _slowly():
            await super().update_adapter(adapter)


@asynccontextmanager
async def _slowly() -> AsyncIterator[None]:
    await asyncio.sleep(0.02)
    yield
    await asyncio.sleep(0.02)


class VersionedIds(FinishesOnOld):
    """Gives each version a new name and id, once nothing runs, and answers nothing before the first."""

    capabilities = FinishesOnOld.capabilities - {Capability.STABLE_ID, Capability.BASE_BEFORE_SYNC} | {
        Capability.VERSIONED_ID
    }

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.adapter and self.version is None:
            raise RuntimeError("no adapter yet")
        return await super().generate(request)

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await self._drained()
        await self.engine.remove_lora(self.lora_int_id)
        self.lora_int_id += 1
        self.lora_name = f"policy-{self.lora_int_id}"
        await super()._commit(version, plain)


class FewAtATime(AsyncRollout):
    """Answers three requests at a time and lets the others wait."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._turns = asyncio.Semaphore(3)

    async def generate(self, request: GenerateRequest) -> Completion:
        async with self._turns:
            return await super().generate(request)


class TokensOnly(AsyncRollout):
    """Gives no logprobs, and declares none."""

    capabilities = AsyncRollout.capabilities - {Capability.LOGPROBS}

    async def generate(self, request: GenerateRequest) -> Completion:
        return replace(await super().generate(request), logprobs=None)


class DeclaresNothing(AsyncRollout):
    """Serves the adapter and nothing else: no base model, no inventory, an error before the first update."""

    capabilities = frozenset({Capability.LOGPROBS})

    async def generate(self, request: GenerateRequest) -> Completion:
        if not request.adapter or self.version is None:
            raise RuntimeError("there is nothing to answer with")
        return await super().generate(request)

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        raise NotImplementedError


class ListsForTuples(AsyncRollout):
    """Returns lists where the protocol's types say tuples."""

    async def generate(self, request: GenerateRequest) -> Completion:
        found: Any = await super().generate(request)
        return replace(found, token_ids=list(found.token_ids), logprobs=list(found.logprobs))


class Placeholder(AsyncRollout):
    """Starts with an adapter that changes nothing, so that every request has one."""

    async def generate(self, request: GenerateRequest) -> Completion:
        async with self._updating:
            if self._path is None:
                plain = self._nothing()
                self._path = await self.sync.push(self.engine, self.lora_name, self.lora_int_id, plain)
        return await super().generate(request)

    def _nothing(self) -> PlainAdapter:
        tensors = {}
        for name, (n_in, n_out) in self._layers.shapes.items():
            if name.rpartition(".")[2] in ("q_proj", "down_proj"):
                tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(1, n_in)
                tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(n_out, 1)
        dtype = getattr(torch, self.spec.dtype)
        return PlainAdapter(
            1, ("down_proj", "q_proj"), {name: tensor.to(dtype) for name, tensor in tensors.items()}
        )


class UnloadsFirst(AsyncRollout):
    """Removes the old adapter before it adds the new one, both while nobody asks."""

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await self.engine.remove_lora(self.lora_int_id)
        await super()._commit(version, plain)


class ClearsTheCache(AsyncRollout):
    """Has no salt, and clears the prefix cache after each update."""

    def _cache_salt(self) -> str | None:
        return None

    async def _commit(self, version: int, plain: PlainAdapter) -> None:
        await super()._commit(version, plain)
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the prefix cache is in use")


class NoPrefixCache(AsyncRollout):
    """Computes every prompt anew."""

    def _cache_salt(self) -> str | None:
        return f"{self._life}-{next(self._ids)}"


class StopsEarly(AsyncRollout):
    """Ends a completion at a token of its own choice, after at least twelve, and says so."""

    async def generate(self, request: GenerateRequest) -> Completion:
        found = await super().generate(request)
        ends = [i + 1 for i, token in enumerate(found.token_ids) if i >= 11 and token % 8 == 0]
        if not ends or ends[0] == len(found.token_ids):
            return found
        return replace(
            found,
            token_ids=found.token_ids[: ends[0]],
            logprobs=(found.logprobs or ())[: ends[0]],
            finish_reason="stop",
        )


class FromMemory(AsyncRollout):
    """Sends its updates as tensors, without a file."""


def _odd(rollout: type[AsyncRollout], **options: Any) -> Case:
    return bad(rollout, "", "", **options)


ODD = (
    *map(_odd, (VersionedIds, FinishesOnOld, Restarts, AbortsInFlight)),
    *map(_odd, (Slow, FewAtATime, TokensOnly, DeclaresNothing, ListsForTuples, Placeholder, UnloadsFirst)),
    *map(_odd, (ClearsTheCache, NoPrefixCache, StopsEarly)),
    _odd(FromMemory, sync=lambda spec: TensorSync()),
)
