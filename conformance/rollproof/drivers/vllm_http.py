"""A rollout on vLLM's own HTTP server (``vllm serve``), as a trainer has it that talks to one.

An update writes a PEFT folder and has the server load it in place under one name. The server is one
that runs already (``url=http://host:8000``), or one that is started here. Whether an adapter can be
served is for the server to say: nothing here looks into its tensors.

Requests in flight during an update go on with the new weights and the KV they have ("continue-mixed").
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..protocol import Adapter, Capability, Completion, GenerateRequest, LoadedAdapter, RolloutSpec
from .folders import Folders
from .openai_api import ROUTES, Client, ServerError, completion_body, completions
from .vllm_process import Server, started

_COMPLETIONS = "/v1/completions"
_ANY_PROMPT = (1, 2, 3)
_UNSHOWN_ID = 0
"""The server doesn't show int ids, and vLLM gives none below 1."""


@asynccontextmanager
async def make(
    spec: RolloutSpec,
    url: str = "",
    adapters: str = "",
    python: str = sys.executable,
    start_seconds: str = "300",
    **server: str,
) -> AsyncIterator[HttpRollout]:
    """Attach to the server at ``url``, or start one with this ``python`` for the length of the context.

    ``adapters`` is an existing folder for adapters that the server sees under the same path
    (``spec.workdir`` unless given). Further options go to the command line of a server that is started:
    ``gpu_memory_utilization=0.3``, ``enforce_eager=true``. The key that a server may ask for is taken
    from the environment's VLLM_API_KEY.

    Raises ValueError for options that don't go together, or a server of another model than
    ``spec.model_path``, and ServerError where no server answers.
    """
    if url and server:
        raise ValueError(
            f"{', '.join(server)}: an option of a server that is started, while url={url} names one that runs"
        )
    key = os.environ.get("VLLM_API_KEY")
    folder = Path(adapters or spec.workdir)
    if url:
        async with _attached(Client(url, key=key), spec, folder) as rollout:
            yield rollout
    else:
        async with (
            started(spec, python, float(start_seconds), server) as own,
            _attached(Client(own.url, key=key, trouble=own.trouble), spec, folder, own) as rollout,
        ):
            yield rollout


@asynccontextmanager
async def _attached(
    client: Client, spec: RolloutSpec, folder: Path, own: Server | None = None
) -> AsyncIterator[HttpRollout]:
    """A rollout on the server of a client, which is closed with it."""
    try:
        version = await client.version()
        base = _base(await client.models())
        _check_model(spec, base)
        spec = replace(spec, max_model_len=min(spec.max_model_len, base.get("max_model_len") or sys.maxsize))
        # What a server shows depends on its options.
        probe = GenerateRequest(_ANY_PROMPT, max_tokens=1, adapter=False)
        answer = await client.post(_COMPLETIONS, completion_body(probe, base["id"], 1, None))
        cached = completions([answer], 1)[0].num_cached_tokens
        rollout = HttpRollout(client, spec, base["id"], Folders(folder), own)
        rollout.details = {"engine": f"vLLM {version}", "server": "started" if own else client.url}
        if cached is not None:
            rollout.capabilities |= {Capability.PREFIX_CACHE}
        try:
            yield rollout
        finally:
            await rollout.close()
    finally:
        await client.close()


class HttpRollout:
    """One adapter name on a vLLM server. ``make`` starts one.

    Its inventory is the server's list of models, which isn't the engine's: an adapter that is unloaded leaves
    the list at once, and the engine when another needs its place.
    """

    routes = ROUTES
    inventory_bound = 1

    def __init__(
        self, client: Client, spec: RolloutSpec, base: str, folders: Folders, own: Server | None
    ) -> None:
        self.spec = spec
        self.details: dict[str, str] = {}
        self.capabilities = frozenset(
            {
                Capability.BASE,
                Capability.LOGPROBS,
                Capability.INVENTORY,
                Capability.CONTINUE_MIXED,
                Capability.CANCEL,
                Capability.ROUTES,
                Capability.SAMPLES,
                Capability.UNLOAD,
            }
        )
        if own is not None:
            self.capabilities |= {Capability.PROCESSES}
        self._client = client
        self._base = base
        self._folders = folders
        self._own = own
        self._life = uuid.uuid4().hex[:8]
        self.lora_name = f"rollproof-{self._life}"
        self._version: int | None = None
        self._digest = ""
        self._folder: Path | None = None
        self._epoch = 0
        self._updating = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, from the newest adapter or from the base model.

        Raises ServerError when the server refuses it, as it does before the first update, and ValueError
        for an unknown route. Cancelling it closes the connection, for which vLLM aborts the request.
        """
        return (await self.generate_n(request, 1))[0]

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Completion]:
        """Sample ``n`` completions of one prompt (see ``generate``)."""
        if request.adapter:
            # vLLM keys its prefix cache by the adapter's name and path, never by its weights.
            body = completion_body(request, self.lora_name, n, f"{self.lora_name}-{self._epoch}")
        else:
            body = completion_body(request, self._base, n, None)
        with self._folders.reading():
            if request.route == "stream":
                chunks = [chunk async for chunk in self._client.events(_COMPLETIONS, body)]
            else:
                chunks = [await self._client.post(_COMPLETIONS, body)]
        return completions(chunks, n)

    async def update_adapter(self, adapter: Adapter) -> None:
        """Write ``adapter`` to a new folder and have the server load it in place.

        Raises ServerError when the server refuses it, ValueError for a version that shrinks or comes again
        with other contents, and whatever writing the folder raises. One that is cancelled leaves open which
        adapter serves until the next update.
        """
        async with self._updating:
            digest = await asyncio.to_thread(adapter.digest)
            if not self._is_new(adapter.version, digest):
                return
            try:
                folder = await self._load(adapter)
                await self._join()
            finally:
                # Also after an error: whatever KV was computed meanwhile is nobody's any more.
                self._epoch += 1
            self._version, self._digest = adapter.version, digest
            self._replace(folder)

    async def unload_adapter(self) -> None:
        """Take the adapter's name off the server: requests for it are refused, as before the first update."""
        async with self._updating:
            await self._unload()

    async def loaded_adapters(self) -> list[LoadedAdapter]:
        """The server's models that bear this rollout's name; int ids aren't shown, and are 0 here."""
        names = [card["id"] for card in await self._client.models()]
        return [LoadedAdapter(name, _UNSHOWN_ID) for name in names if name == self.lora_name]

    async def process_ids(self) -> list[int]:
        """The server's process and all below it, of a server that was started here."""
        if self._own is None:
            raise RuntimeError("the processes of a server that was attached to aren't known")
        return self._own.process_ids()

    async def close(self) -> None:
        """Leave the server as it was found."""
        with suppress(ServerError):  # it may be gone, and the adapter with it
            await self._unload()
        self._folders.clear()

    async def _load(self, adapter: Adapter) -> Path:
        folder = self._folders.open()
        try:
            await asyncio.to_thread(adapter.save, folder)
            await self._client.post(
                "/v1/load_lora_adapter",
                {"lora_name": self.lora_name, "lora_path": str(folder), "load_inplace": True},
            )
        except Exception as error:
            if not (isinstance(error, ServerError) and error.status is None):
                self._folders.replaced(folder)  # otherwise the server may have loaded it
            raise
        return folder

    async def _join(self) -> None:
        """Have requests in flight go on with what was just loaded.

        vLLM up to 0.32 keeps load_inplace set on requests: at each step it reads the folder of the one that
        joined the batch last, so that those in flight stay with the old folder until another joins.
        """
        request = GenerateRequest(_ANY_PROMPT, max_tokens=1)
        body = completion_body(request, self.lora_name, 1, f"{self.lora_name}-join-{self._epoch}")
        del body["logprobs"]  # nobody reads them, and those of a broken adapter may be no JSON
        with self._folders.reading():
            await self._client.post(_COMPLETIONS, body)

    async def _unload(self) -> None:
        if self._version is None:
            return
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": self.lora_name})
        self._version, self._digest = None, ""
        self._epoch += 1
        self._replace(None)

    def _replace(self, folder: Path | None) -> None:
        old, self._folder = self._folder, folder
        if old is not None:
            self._folders.replaced(old)

    def _is_new(self, version: int, digest: str) -> bool:
        if self._version is None or version > self._version:
            return True
        if version < self._version:
            raise ValueError(f"version {version} came after version {self._version}; versions never shrink")
        if digest != self._digest:
            raise ValueError(
                f"version {version} came again with other tensors or another config; "
                "give a changed adapter a higher version"
            )
        return False


def _base(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The base model among those that the server lists: adapters have a parent."""
    for card in models:
        if not card.get("parent"):
            return card
    raise ServerError(f"the server lists no base model: {json.dumps(models)}")


def _check_model(spec: RolloutSpec, base: Mapping[str, Any]) -> None:
    """Raise ValueError where the server's model is a folder on this machine, and another model."""
    mine, theirs = (Path(root, "config.json") for root in (spec.model_path, base.get("root") or ""))
    if theirs.is_file() and mine.is_file() and theirs.read_bytes() != mine.read_bytes():
        raise ValueError(
            f"the server serves {base['root']}, and is to be judged as {spec.model_path}: their config.json "
            f"differ; give --model {base['root']}"
        )
