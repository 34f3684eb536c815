"""``rollproof judge`` on the command line: exit codes, one line for bad input, the report's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch

from conftest import MakeAdapter
from rollproof.candidates import BASE
from rollproof.cli import main
from rollproof.oracle import Oracle
from rollproof.protocol import Completion, GenerateRequest
from rollproof.record import Recorder
from rollproof.report import schema

TOKENS = 16


@pytest.fixture
def judge(tmp_path: Path, model_path: Path) -> Callable[..., int]:
    """``judge(*more)``: the exit code for the record in the test's folder."""

    def run(*more: str) -> int:
        adapters = ("--adapters", str(tmp_path / "adapters"))
        return main(["judge", str(tmp_path / "history.jsonl"), "--model", str(model_path), *adapters, *more])

    return run


@pytest.fixture
def record(tmp_path: Path, base_oracle: Oracle, adapter: MakeAdapter) -> Callable[[int], None]:
    """``record(served)``: two updates; after the second, eight prompts are answered by ``served``."""

    def run(served: int) -> None:
        ids = torch.randint(0, 1000, (8, 20), generator=torch.Generator().manual_seed(0)).tolist()
        with Recorder(tmp_path / "history.jsonl", tmp_path / "adapters", dtype="float32") as recorder:
            for version in (1, 2):
                with recorder.update(adapter(version)):
                    base_oracle.add(adapter(version))
            samples = base_oracle.sample(served, [tuple(row) for row in ids], TOKENS)
            for sample, scores in zip(samples, base_oracle.score(served, samples), strict=True):
                with recorder.request(GenerateRequest(sample.prompt, TOKENS)) as answer:
                    answer(Completion(sample.tokens, tuple(scores.logprobs.tolist())))
        for version in (1, 2):
            base_oracle.forget(version)

    return run


def test_a_right_record_conforms(record, judge, capsys: pytest.CaptureFixture[str]):
    record(2)
    assert judge() == 0
    told = capsys.readouterr().out
    assert "SYNC-003   pass           after version 2: 8 of 8 completions judged" in told
    assert "CACHE-001  not-applicable no adapter request reused KV" in told
    assert told.endswith("conforms (1 pass, 7 not-applicable)\n")


def test_a_wrong_one_does_not_and_leaves_the_same_files_as_a_run(
    record, judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record(1)
    assert judge("--report", str(tmp_path / "out")) == 1
    told = capsys.readouterr().out
    message = "after version 2: completion 1 of 8: expected version 2; these logprobs are those of version 1"
    assert f"SYNC-003   fail           {message}" in told
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    jsonschema.validate(report, schema())
    assert not report["ok"]
    assert (tmp_path / "out" / "report.md").read_text().startswith("# Does not conform")
    assert "SYNC-003" in (tmp_path / "out" / "junit.xml").read_text()
    (failed,) = [result for result in report["results"] if result["outcome"] == "fail"]
    (witness,) = failed["witness"]
    assert f"witness: token {witness['token']} of request {witness['started']}, which ended at" in told
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[witness["started"]])["event"] == "request started"
    assert failed["reproduce"].startswith("rollproof judge ")
    assert main(failed["reproduce"].split()[1:]) == 1


def test_a_record_that_shows_nothing_does_not_conform(
    tmp_path: Path, judge, capsys: pytest.CaptureFixture[str]
):
    Recorder(tmp_path / "history.jsonl", tmp_path, dtype="float32").close()
    (tmp_path / "adapters").mkdir()
    assert judge() == 1
    assert "nothing could be shown either way" in capsys.readouterr().err


def test_bad_input_is_told_in_one_line(record, judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record(BASE)

    def told(*more: str) -> str:
        with pytest.raises(SystemExit) as end:
            judge(*more)
        assert end.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "error: no model at 'nowhere'" in told("--model", "nowhere")
    assert "error: no model at 'tiny-qwen2'" in told("--model", "tiny-qwen2")
    assert "error: no folder of adapters at nowhere" in told("--adapters", "nowhere")
    assert "error: --most is 0; it has to be at least 1" in told("--most", "0")
    assert "the oracle can't run on 'cuda:99'" in told("--oracle-device", "cuda:99")
    assert "invalid choice: 'int8'" in told("--dtype", "int8")
    assert "invalid choice: 'drop'" in told("--in-flight", "drop")
    (tmp_path / "adapters" / "2" / "adapter_model.safetensors").write_bytes(b"nothing")
    assert "error: the adapter of version 2 can't be read" in told()
    file = tmp_path / "history.jsonl"
    file.write_text(2 * file.read_text())
    assert "holds the lives of 2 rollouts; choose one: --life 1 to 2" in told()
    assert "choose one: --life 1 to 2" in told("--life", "3")
    file.write_text(file.read_text()[:-9])
    assert "line 44: the last line is cut off" in told()


def test_one_of_several_rollouts_can_be_chosen(record, judge, tmp_path: Path):
    record(2)
    file = tmp_path / "history.jsonl"
    file.write_text(2 * file.read_text())
    assert judge("--life", "2") == 0


def test_the_help_says_what_comes_in_and_what_comes_out():
    """In a process of its own, as it is installed."""
    command = [sys.executable, "-m", "rollproof.cli", "judge", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ}).stdout
    for word in ("HISTORY", "--adapters DIR", "--in-flight", "Exit code 0"):
        assert word in told
