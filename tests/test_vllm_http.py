"""The driver for vLLM's HTTP server: against one that says what a test wants, and judged on a real one."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from conftest import MakeAdapter
from fake_server import BASE, FakeServer, choice, stream
from rollproof import Outcome, Settings, check_rollout
from rollproof.drivers.folders import Folders
from rollproof.drivers.openai_api import Client, ServerError
from rollproof.drivers.vllm_http import HttpRollout, make
from rollproof.drivers.vllm_process import Server, arguments, started
from rollproof.protocol import Capability, Completion, GenerateRequest, LoadedAdapter, RolloutSpec

REQUEST = GenerateRequest((7, 8, 9), 2, temperature=1.0, seed=3)
ANSWER = Completion((5, 6), (-0.5, -1.25), "length", 2)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def there(folder: str) -> bool:
    return Path(folder).exists()


@pytest_asyncio.fixture(loop_scope="session")
async def rollout(server: FakeServer, spec: RolloutSpec) -> AsyncIterator[HttpRollout]:
    async with make(spec, url=server.url) as attached:
        yield attached


async def test_what_is_asked_is_what_the_kit_means(
    server: FakeServer, rollout: HttpRollout, adapter: MakeAdapter
):
    await rollout.update_adapter(adapter(1))
    assert await rollout.generate(REQUEST) == ANSWER
    assert await rollout.generate(replace(REQUEST, route="stream")) == ANSWER
    assert await rollout.generate_n(replace(REQUEST, adapter=False), 3) == [ANSWER] * 3
    with pytest.raises(ValueError, match="route is 'chat'; allowed: default, stream"):
        await rollout.generate(replace(REQUEST, route="chat"))
    plain, streamed, base = server.bodies("/v1/completions")
    assert plain["model"] == rollout.lora_name
    assert (plain["prompt"], plain["max_tokens"], plain["seed"]) == ([7, 8, 9], 2, 3)
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["ignore_eos"]) == (1.0, 1.0, 0, True)
    assert streamed == plain | {"stream": True, "stream_options": {"include_usage": True}}
    assert (base["model"], base["n"], "cache_salt" in base) == (BASE, 3, False)


async def test_what_the_server_shows_is_what_is_declared(server: FakeServer, spec: RolloutSpec):
    async with make(spec, url=server.url) as rollout:
        assert Capability.PREFIX_CACHE in rollout.capabilities
        assert Capability.PROCESSES not in rollout.capabilities
        assert rollout.spec.max_model_len == 512 < spec.max_model_len
        assert rollout.details == {"engine": "vLLM 0.32.0", "server": server.url}
    server.answers["/v1/completions"] = 200, {"choices": [choice()], "usage": {"prompt_tokens": 3}}
    async with make(spec, url=server.url) as rollout:
        assert Capability.PREFIX_CACHE not in rollout.capabilities


async def test_an_update_is_a_new_folder_under_one_name_and_a_new_salt(
    server: FakeServer, rollout: HttpRollout, adapter: MakeAdapter
):
    with pytest.raises(ServerError, match=r"completions was refused \(404\): The model .* does not exist"):
        await rollout.generate(REQUEST)
    for version in (1, 2):
        await rollout.update_adapter(adapter(version))
        await rollout.generate(REQUEST)
        assert await rollout.loaded_adapters() == [LoadedAdapter(rollout.lora_name, 0)]
    first, second = server.bodies("/v1/load_lora_adapter")
    assert first["lora_name"] == second["lora_name"] == rollout.lora_name
    assert first["load_inplace"] is second["load_inplace"] is True
    assert server.files == [["adapter_config.json", "adapter_model.safetensors"]] * 2
    assert (there(first["lora_path"]), there(second["lora_path"])) == (False, True)
    salts = [body["cache_salt"] for body in server.bodies("/v1/completions")[1:]]
    assert len(set(salts)) == 2
    await rollout.unload_adapter()
    assert await rollout.loaded_adapters() == []
    assert not there(second["lora_path"])


async def test_a_folder_stays_while_a_request_may_read_it(
    server: FakeServer, rollout: HttpRollout, adapter: MakeAdapter
):
    await rollout.update_adapter(adapter(1))
    (old,) = server.loaded.values()
    server.hold.clear()
    running = asyncio.ensure_future(rollout.generate(REQUEST))
    await asyncio.to_thread(server.held.wait, 10)
    update = asyncio.ensure_future(rollout.update_adapter(adapter(2)))
    await asyncio.wait([update], timeout=5)
    assert update.done()
    assert there(old)
    server.hold.set()
    await running
    await rollout.update_adapter(adapter(3))
    assert not there(old)


async def test_versions_never_shrink_and_come_twice_only_with_the_same_contents(
    server: FakeServer, rollout: HttpRollout, adapter: MakeAdapter
):
    await rollout.update_adapter(adapter(2))
    await rollout.update_adapter(adapter(2))
    assert len(server.bodies("/v1/load_lora_adapter")) == 1
    with pytest.raises(ValueError, match="version 2 came again with other tensors"):
        await rollout.update_adapter(adapter(2, seed=1))
    with pytest.raises(ValueError, match="version 1 came after version 2"):
        await rollout.update_adapter(adapter(1))


async def test_a_refused_update_says_why_and_leaves_the_version_free(
    server: FakeServer, rollout: HttpRollout, adapter: MakeAdapter
):
    await rollout.update_adapter(adapter(1))
    server.answers["/v1/load_lora_adapter"] = 500, {"error": {"message": "rank 32 is too large"}}
    with pytest.raises(ServerError, match=r"load_lora_adapter was refused \(500\): rank 32 is too large$"):
        await rollout.update_adapter(adapter(2))
    (kept,) = server.loaded.values()
    assert [path.name for path in Path(kept).parent.iterdir()] == ["1"]
    del server.answers["/v1/load_lora_adapter"]
    await rollout.update_adapter(adapter(2))
    assert server.loaded[rollout.lora_name] != kept


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (200, {"choices": [choice(token_ids=None)]}, "no token_ids: it has to be a vLLM that knows"),
        (200, {"choices": [choice(logprobs=None)]}, "2 token_ids, 0 logprobs and the finish_reason 'length'"),
        (200, {"choices": [choice(finish_reason=None)]}, "2 logprobs and the finish_reason None"),
        (200, {"choices": [choice(logprobs={"token_logprobs": [None, -1]})]}, "can't be read (TypeError"),
        (200, {"choices": []}, "the choices [] for n=1"),
        (200, {"choices": [choice(index=1)]}, "the choices [1] for n=1"),
        (200, {"text": "hello"}, "can't be read (KeyError: 'choices')"),
        (200, "<html>busy</html>", "can't be read (TypeError"),
        (400, {"error": {"message": "too long", "code": 400}}, "was refused (400): too long"),
        (401, {"error": "Unauthorized"}, 'was refused (401): {"error": "Unauthorized"}'),
        (503, "", "was refused (503): no reason given"),
    ],
    ids=str,
)
async def test_an_answer_that_is_none_is_an_error_that_says_so(
    status: int, content: Any, message: str, server: FakeServer, rollout: HttpRollout
):
    server.answers["/v1/completions"] = status, content
    with pytest.raises(ServerError) as told:
        await rollout.generate(replace(REQUEST, adapter=False))
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (stream({"choices": [choice(finish_reason=None)]}, done=False), "the stream ended without [DONE]"),
        (stream({"choices": [choice(finish_reason=None)]}), "and the finish_reason None"),
        (stream({"error": {"message": "the engine died"}}), "the engine died"),
        ("data: {\n\ndata: [DONE]\n\n", "answered what is no JSON"),
    ],
    ids=["cut off", "unfinished", "error", "no JSON"],
)
async def test_a_stream_that_breaks_is_an_error_that_says_so(
    content: str, message: str, server: FakeServer, rollout: HttpRollout
):
    server.answers["/v1/completions"] = 200, content
    with pytest.raises(ServerError) as told:
        await rollout.generate(replace(REQUEST, adapter=False, route="stream"))
    assert message in str(told.value)


async def test_a_server_that_dies_is_named(spec: RolloutSpec):
    server = FakeServer()
    async with make(spec, url=server.url) as rollout:
        server.close()
        for route in rollout.routes:
            with pytest.raises(ServerError, match=f"POST {server.url}/v1/completions: "):
                await rollout.generate(replace(REQUEST, route=route))
    with pytest.raises(ServerError, match=f"GET {server.url}/version: ConnectError"):
        async with make(spec, url=server.url):
            pass


async def refusal(context: AbstractAsyncContextManager[Any]) -> str:
    with pytest.raises((ValueError, ServerError, FileNotFoundError)) as told:
        async with context:
            pass
    return str(told.value)


async def test_what_is_no_server_for_this_run_is_refused(
    server: FakeServer, spec: RolloutSpec, tmp_path: Path
):
    assert "max_loras: an option of a server that is started" in await refusal(
        make(spec, url=server.url, max_loras="2")
    )
    (tmp_path / "config.json").write_text("{}")
    card = {"id": "other", "root": str(tmp_path)}
    server.answers["/v1/models"] = 200, {"data": [card]}
    assert f"give --model {tmp_path}" in await refusal(make(spec, url=server.url))
    server.answers["/v1/models"] = 200, {"data": [card | {"parent": "lost"}]}
    assert "lists no base model" in await refusal(make(spec, url=server.url))
    server.answers["/v1/models"] = 200, {"object": "list"}
    assert "no list of models" in await refusal(make(spec, url=server.url))
    server.answers["/version"] = 200, "v1"
    assert "no vLLM server does" in await refusal(make(spec, url=server.url))


def interpreter(folder: Path, script: str) -> str:
    """An interpreter that does something else than to run Python."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


async def test_a_server_that_does_not_start_shows_the_end_of_its_log(spec: RolloutSpec, tmp_path: Path):
    python = interpreter(tmp_path, "echo unrecognized arguments: $2; exit 3")
    said = await refusal(make(spec, python=python))
    assert "did not start: the server's process ended with 3" in said
    assert said.endswith("unrecognized arguments: vllm.entrypoints.openai.api_server")
    assert "no model at" in await refusal(make(replace(spec, model_path=str(tmp_path)), python=python))
    assert "of rank 512 at most" in await refusal(make(replace(spec, max_lora_rank=513), python=python))


async def test_a_server_that_is_never_ready_is_ended_with_all_its_processes(
    spec: RolloutSpec, tmp_path: Path
):
    python = interpreter(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; echo loading; wait")
    said = await refusal(make(spec, python=python, start_seconds="0.6"))
    assert "was not ready within 0.6 s" in said
    assert said.endswith("loading")
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "child").read_text())).wait(5)


KILLED = """
import asyncio, os, signal, sys
from rollproof.drivers.vllm_process import started
from rollproof.protocol import RolloutSpec

async def run():
    asyncio.get_running_loop().call_later(1, os.kill, os.getpid(), signal.SIGKILL)
    async with started(RolloutSpec(sys.argv[1], workdir=sys.argv[2]), sys.argv[3], 60, {}):
        pass

asyncio.run(run())
"""


def test_a_server_does_not_outlive_a_kit_that_is_killed(model_path: Path, tmp_path: Path):
    python = interpreter(tmp_path, f"echo $$ > {tmp_path}/server; exec sleep 600")
    kit = subprocess.run([sys.executable, "-c", KILLED, str(model_path), str(tmp_path), python], timeout=120)
    assert kit.returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "server").read_text())).wait(5)


def test_options_replace_and_add_to_the_command_line(spec: RolloutSpec):
    given = arguments(replace(spec, max_lora_rank=24), {"max_loras": "3", "enforce_eager": "false"})
    pairs = dict(itertools.pairwise(given))
    assert (pairs["--max-lora-rank"], pairs["--max-loras"], pairs["--dtype"]) == ("32", "3", spec.dtype)
    assert "--enable-lora" in given
    assert "--no-enforce-eager" in given
    assert "--enforce-eager" not in given


def test_a_request_without_an_answer_keeps_its_folders_and_no_later_ones(tmp_path: Path):
    folders = Folders(tmp_path)
    first = folders.open()
    first.mkdir()
    with suppress(KeyboardInterrupt), folders.reading():
        second = folders.open()
        second.mkdir()
        folders.replaced(first)
        raise KeyboardInterrupt
    third = folders.open()
    third.mkdir()
    folders.replaced(second)
    folders.replaced(third)
    assert sorted(path.name for path in folders.root.iterdir()) == ["1", "2"]
    folders.clear()
    assert list(tmp_path.iterdir()) == []


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_server(spec: RolloutSpec) -> AsyncIterator[Server]:
    async with started(spec, sys.executable, 300, {"gpu_memory_utilization": "0.3"}) as server:
        yield server


JUDGED = ("SYNC-001", "SYNC-006", "BASE-002", "LIFE-001", "LIFE-004", "NUM-003", "CACHE-001", "FLIGHT-001")


async def test_vllm_s_own_server_is_judged_and_left_as_it_was(vllm_server: Server, spec: RolloutSpec):
    settings = Settings(spec.model_path, spec.dtype, only=JUDGED)
    report = await check_rollout(make, settings, url=vllm_server.url)
    assert {r.clause: r.message for r in report.results if r.outcome != Outcome.PASS} == {}
    assert report.ok
    assert report.details["engine"].startswith("vLLM ")
    assert vllm_server.trouble() == ""
    client = Client(vllm_server.url)
    assert [card["id"] for card in await client.models()] == [spec.model_path]
    await client.close()
