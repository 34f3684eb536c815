"""The benchmarks' own parts, without an engine."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollproof.protocol import Completion, GenerateRequest
from rollproof_benchmarks.report import Run, break_even, costs, main, told
from rollproof_benchmarks.traffic import Traffic, every, requests, run, summary
from rollproof_benchmarks.trainer import Trainer


class Stopping:
    """Gives a token at a time, and stops for a while once."""

    def __init__(self, pause: float, lose: int = 0) -> None:
        self.pause, self.lose = pause, lose

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        for index in range(request.max_tokens - self.lose):
            await asyncio.sleep(self.pause if index == 5 else 0.001)
            yield Completion((index,), (0.0,), "length")


async def test_the_longest_gap_is_the_pause():
    traffic = await run(Stopping(0.2), requests(4, 12, 0))
    assert max(traffic.gaps) >= 0.2 > statistics.median(traffic.gaps)
    assert traffic.lost == 0


async def test_lost_tokens_are_counted():
    assert (await run(Stopping(0.01, lose=3), requests(2, 12, 0))).lost == 6


async def test_updates_run_beside_requests_and_end_with_them():
    times: list[float] = []

    async def update() -> None:
        times.append(asyncio.get_running_loop().time())

    await run(Stopping(0.3), requests(2, 12, 0), every(0.05, update))
    assert 4 <= len(times) <= 12
    count = len(times)
    await asyncio.sleep(0.12)
    assert len(times) == count


async def test_an_update_that_fails_fails_the_run():
    async def update() -> None:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        await run(Stopping(0.1), requests(2, 12, 0), update)


def test_only_the_time_in_which_all_decode_counts():
    slow, fast = [(1.0, 1), (2.0, 1), (3.0, 1)], [(0.0, 1), (0.9, 1), (1.5, 1), (2.5, 1), (9.0, 1)]
    traffic = Traffic(8, [slow, fast])
    assert traffic.full == (1.0, 3.0)
    assert sorted(traffic.gaps) == [1.0, 1.0, 1.0]
    assert traffic.throughput == 2.0


def test_prompts_share_no_beginning():
    prompts = [request.prompt_token_ids for salt in (0, 1) for request in requests(64, 4, salt)]
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)


def test_a_summary_is_in_milliseconds():
    found = summary([0.004, 0.001, 0.002, 0.003, 0.1])
    assert found["median_ms"] == pytest.approx(3)
    assert (found["count"], found["min_ms"], found["max_ms"]) == (5, 1, 100)


def test_each_step_is_another_version_of_other_numbers():
    trainer = Trainer({"a.q_proj": (16, 8), "a.o_proj": (8, 16)}, 4, torch.float32, "cpu")
    first = trainer.step()
    before = {name: tensor.clone() for name, tensor in first.tensors.items()}
    second = trainer.step()
    assert (first.version, second.version) == (1, 2)
    assert not any(tensor.equal(before[name]) for name, tensor in second.tensors.items())
    assert trainer.bytes == 4 * trainer.elements == 4 * 4 * (16 + 8) * 2
    assert second.config.target_modules == {"q_proj", "o_proj"}


def item(test: str, times: list[float], **info: Any) -> dict[str, Any]:
    shared = {
        "device": "a device", "size": "7b", "rank": 32, "adapter bytes": 1_000_000, "adapter tensors": 4,
        "trainer dtype": "bfloat16", "trainer device": "cuda", "versions": {"vllm": "1", "ray": "absent"},
    }  # fmt: skip
    return {"name": f"test_{test}", "stats": {"data": times}, "extra_info": shared | info}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    found = [
        item("acknowledged[arena]", [0.003, 0.001, 0.002]),
        item("acknowledged[fold]", [0.001]),
        item("acknowledged[save+remove+add]", [0.4]),
        item(
            "copy_beside_the_floor[fold]",
            [1.0],
            copy_us=8000,
            floor_us=6000,
            copied_bytes=13e9,
            copy_to_floor=1.3,
        ),
        item("throughput[adapter]", [1.0], throughput=10_000),
        item("throughput[fold]", [1.0], throughput=20_000),
        item("throughput[merged]", [1.0], throughput=20_000),
        item("full_push[merged]", [0.2]),
        item("fold_beside_merged[merged]", [1.0], turns=8, fold=19_000, merged=20_000, fold_to_merged=0.9512),
    ]
    (tmp_path / "one.json").write_text(json.dumps({"benchmarks": found}))
    return tmp_path


def test_a_table_says_what_was_measured(results: Path):
    text = told(Run.read(results / "one.json"))
    assert "| sync=arena | 2.00 ms | 3.00 ms |  | 200.0 times |" in text
    assert "sync=fold takes 8000 µs for 13000 MB" in text
    assert "| adapter requests | 10,000 | 0.50 |" in text
    assert "By turns, the median of 8: sync=fold gives 0.951 of the tokens" in text
    assert "ray" not in text


def test_the_break_even_weighs_updates_against_tokens(results: Path):
    found = costs(Run.read(results / "one.json"))
    # A fold returns in 1 ms and keeps the device for 8.
    assert found == {"arena": (0.002, 10_000), "fold": (0.008, 20_000), "full push": (0.2, 20_000)}
    tokens = break_even(found["arena"], found["fold"])
    assert tokens == pytest.approx(120)
    slow, fast = (seconds + tokens / rate for seconds, rate in (found["arena"], found["fold"]))
    assert slow == pytest.approx(fast)
    text = told(Run.read(results / "one.json"))
    assert "fold is ahead of arena from 120 tokens" in text
    assert "fold is never behind full push" in text


def test_a_sweep_tells_how_a_cost_grows(tmp_path: Path):
    found = [
        {
            "name": f"test_fill_and_copy[{mb}]",
            "stats": {"data": [1.0]},
            "extra_info": {
                "device": "a device", "model": "m", "rank": 8, "adapter bytes": mb * 1e6,
                "fill_us": 5 + 0.6 * mb, "copy_us": 3 + 0.5 * mb, "floor_us": 1 + 0.4 * mb,
            },
        }
        for mb in (100, 10, 1000)
    ]  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps({"benchmarks": found}))
    text = told(Run.read(tmp_path / "sweep.json"))
    assert "copying takes 0.500 µs per MB more, 1.25 times the fastest copy" in text
    assert text.index("| 10.0 |") < text.index("| 100.0 |") < text.index("| 1000.0 |")


def test_another_file_is_named(tmp_path: Path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="x.json is no result of pytest-benchmark"):
        Run.read(tmp_path / "x.json")


def test_a_folder_gets_a_page_and_plots(results: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sys.argv", ["report", str(results)])
    main()
    assert "## one" in (results / "README.md").read_text()
    assert {file.name for file in results.glob("*.png")} == {"updates.png", "one-break-even.png"}
