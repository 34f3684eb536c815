"""vLLM's HTTP server as a process: started with room for the adapters, awaited, and ended.

It is started from its command line. Nothing here knows a request or an update.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..protocol import RolloutSpec
from .openai_api import Client, ServerError

_HOST = "127.0.0.1"
_STOP_SECONDS = 20
_TAIL = 25
"""Lines of the server's log that an error shows."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows for --max-lora-rank."""


@dataclass(frozen=True)
class Server:
    """A running server. ``log`` is everything that it printed."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def trouble(self) -> str:
        """How its process ended, with the end of its log; empty while it runs."""
        code = self.process.poll()
        return "" if code is None else f"the server's process ended with {code}. {self.tail()}"

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"The last lines of {self.log}:", *lines[-_TAIL:]])

    def process_ids(self) -> list[int]:
        """Its process and all below it."""
        root = psutil.Process(self.process.pid)
        return [root.pid, *(child.pid for child in root.children(recursive=True))]


@asynccontextmanager
async def started(
    spec: RolloutSpec, python: str, seconds: float, options: Mapping[str, str]
) -> AsyncIterator[Server]:
    """Start a server for the length of the context.

    ``python`` is the interpreter that has vLLM; ``options`` replace or add to what ``arguments`` gives.
    Raises FileNotFoundError for a model folder that isn't there, ValueError for a rank that vLLM can't
    hold, and ServerError when the server ends, or isn't ready within so many seconds.
    """
    server = _launch(spec, python, options)
    try:
        with _ended_with_this(server.process):
            await _ready(server, seconds)
            yield server
    finally:
        await asyncio.to_thread(_stop, server.process)


def _launch(spec: RolloutSpec, python: str, options: Mapping[str, str]) -> Server:
    if not Path(spec.model_path, "config.json").is_file():
        raise FileNotFoundError(
            f"no model at {spec.model_path!r}: it has to be a Hugging Face folder with a config.json"
        )
    port = _free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", _HOST, "--port", str(port)]
    command += arguments(spec, options)
    log = Path(tempfile.mkdtemp(prefix="vllm-server-", dir=spec.workdir), "server.log").resolve()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # a group of its own, by which it is ended
        )
    return Server(f"http://{_HOST}:{port}", process, log)


def arguments(spec: RolloutSpec, options: Mapping[str, str]) -> list[str]:
    """The server's command line for a spec. An option named ``max_loras`` is ``--max-loras``; "true" and
    "false" turn a flag on and off."""
    on_gpu = torch.cuda.is_available()
    chosen = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "max-model-len": str(spec.max_model_len),
        "max-num-seqs": str(spec.max_num_seqs),
        "seed": str(spec.seed),
        "enable-lora": "true",
        # vLLM's CPU build serves a request without adapter with the one in the last slot, so that one has
        # to stay empty, and an unloaded adapter keeps its slot until others need it.
        "max-loras": "1" if on_gpu else "4",
        "max-lora-rank": str(_allowed_rank(spec.max_lora_rank)),
        "logprobs-mode": "raw_logprobs",
        "enable-prompt-tokens-details": "true",
        "generation-config": "vllm",
        "skip-tokenizer-init": "true",  # prompts are token ids
        "gpu-memory-utilization": "0.5",
        "enforce-eager": "false" if on_gpu else "true",
        "disable-uvicorn-access-log": "true",
    }
    chosen |= {name.replace("_", "-"): value for name, value in options.items()}
    given = []
    for name, value in chosen.items():
        if value == "true":
            given.append(f"--{name}")
        elif value == "false":
            given.append(f"--no-{name}")
        else:
            given += [f"--{name}", value]
    return given


def _allowed_rank(rank: int) -> int:
    for allowed in _RANKS:
        if rank <= allowed:
            return allowed
    raise ValueError(f"max_lora_rank is {rank}; vLLM holds adapters of rank {_RANKS[-1]} at most")


def _environment() -> dict[str, str]:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}  # GiB; vLLM's own default is 4
    return environment | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def _ready(server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    client = Client(server.url)
    try:
        while time.monotonic() < deadline:
            with suppress(ServerError):
                await client.get("/health")
                return
            if trouble := server.trouble():
                raise ServerError(f"vLLM's server did not start: {trouble}")
            await asyncio.sleep(0.25)
    finally:
        await client.close()
    raise ServerError(
        f"vLLM's server was not ready within {seconds:g} s (start_seconds=... allows more). {server.tail()}"
    )


@contextmanager
def _ended_with_this(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Have the process's group end if this process dies before the context does, killed or not."""
    watch = ["sh", "-c", 'read -r _; kill -s TERM -- "-$0"', str(process.pid)]
    # It waits for the end of a pipe that this process alone holds open.
    watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):  # whatever of its group is left, the engine above all
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
