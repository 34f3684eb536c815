"""A run is recorded as it was, and what can't be read back is refused in one line that says where."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from conftest import MakeAdapter
from rollproof.candidates import BASE
from rollproof.history import History
from rollproof.protocol import Adapter, Capability, Completion, GenerateRequest
from rollproof.reading import HistoryError, read
from rollproof.record import Recorder, recorded

REQUEST = GenerateRequest((1, 2, 3), 2, temperature=0.7, seed=5)
ANSWER = Completion((4, 5), (-0.1, -1 / 3), "stop", 2, ((0, 1), (1, 2)))


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(
        tmp_path / "history.jsonl", tmp_path / "adapters", dtype="bfloat16", in_flight="continue-mixed"
    )


def run(recorder: Recorder, adapter: MakeAdapter) -> History:
    """Everything that a record can hold; the history as it was before it was closed."""
    history = recorder._history
    assert history is not None
    with recorder.update(adapter(1)), recorder.request(REQUEST) as answer:
        answer(ANSWER)
    with pytest.raises(ValueError, match="no room"), recorder.update(adapter(2)):
        raise ValueError("no room")
    with pytest.raises(asyncio.CancelledError), recorder.request(REQUEST):
        raise asyncio.CancelledError
    with recorder.request(REQUEST, samples=2) as answer:
        answer(ANSWER)
        answer(Completion((), finish_reason="abort"))
    with recorder.unload():
        pass
    with recorder.request(REQUEST):
        pass
    running = recorder.request(REQUEST)
    running.__enter__()
    recorder.close()
    running.__exit__(None, None, None)
    return history


def test_what_was_recorded_is_read_back_exactly(tmp_path: Path, recorder: Recorder, adapter: MakeAdapter):
    written = run(recorder, adapter)
    (found,) = read(tmp_path / "history.jsonl")
    assert found == written
    assert (found.dtype, found.in_flight, found.closed) == ("bfloat16", Capability.CONTINUE_MIXED, True)
    assert [update.version for update in found.updates] == [1, 2, BASE]
    assert [update.error for update in found.updates] == [None, "ValueError: no room", None]
    assert [e.completion for e in found.exchanges] == [ANSWER, ANSWER, Completion((), finish_reason="abort")]
    assert [u.error for u in found.unanswered] == [
        "CancelledError: ",
        "RuntimeError: the block ended without an answer",
    ]
    assert list(found.running.values()) == [(REQUEST, 1)]


def test_adapters_are_kept_as_they_were(tmp_path: Path, recorder: Recorder, adapter: MakeAdapter):
    first, other = adapter(1), adapter(1, seed=1)
    for mine in (first, first, other):
        with recorder.update(mine):
            mine.tensors[next(iter(mine.tensors))].mul_(1)
    recorder.close()
    folder = tmp_path / "adapters"
    assert sorted(path.name for path in folder.iterdir()) == ["1", f"1-{other.digest()[:16]}"]
    assert Adapter.load(folder / "1", 1).digest() == first.digest()


def test_a_record_that_can_not_be_kept_leaves_the_training_alone(
    tmp_path: Path, recorder: Recorder, adapter: MakeAdapter
):
    (tmp_path / "adapters").write_text("in the way")
    pushed = []
    with (
        pytest.warns(RuntimeWarning, match="records no more of this run: .*Error"),
        recorder.update(adapter(1)),
    ):
        pushed.append(1)
    with recorder.update(adapter(2)), recorder.request(REQUEST) as answer:
        answer(ANSWER)
        pushed.append(2)
    recorder.close()
    assert pushed == [1, 2]
    (found,) = read(tmp_path / "history.jsonl")
    assert (len(found.updates), found.exchanges, found.closed) == (1, [], False)


def test_after_its_end_nothing_is_recorded(tmp_path: Path, recorder: Recorder, adapter: MakeAdapter):
    recorder.close()
    with recorder.update(adapter(1)), recorder.request(REQUEST) as answer:
        answer(ANSWER)
    assert read(tmp_path / "history.jsonl")[0].updates == []
    assert not (tmp_path / "adapters").exists()


def test_bad_input_is_refused_before_the_training_starts(tmp_path: Path, recorder: Recorder):
    with pytest.raises(
        FileExistsError, match=r"history.jsonl exists: record each run into a file of its own"
    ):
        Recorder(tmp_path / "history.jsonl", tmp_path, dtype="float32")
    with pytest.raises(ValueError, match="dtype is 'int8'; allowed: float32, bfloat16, float16"):
        Recorder(tmp_path / "new", tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="in_flight is 'drop'; allowed: finish-on-old, .*, None"):
        Recorder(tmp_path / "new", tmp_path, dtype="float32", in_flight="drop")
    with (
        pytest.raises(TypeError, match=r"answer\(\) takes a rollproof.Completion, not a list"),
        recorder.request(REQUEST) as answer,
    ):
        answer([4, 5])  # type: ignore[arg-type]
    recorder.close()


async def test_a_recorded_rollout_is_the_rollout(tmp_path: Path, recorder: Recorder, adapter: MakeAdapter):
    class Sleeps:
        """Requests end in another order than they began."""

        capabilities = frozenset({Capability.BASE})
        inventory_bound = 3

        async def generate(self, request: GenerateRequest) -> Completion:
            for _ in range(random.Random(request.seed).randrange(9)):
                await asyncio.sleep(0)
            return Completion((request.seed or 0,))

        async def update_adapter(self, adapter: Adapter) -> None:
            await asyncio.sleep(0)

        async def loaded_adapters(self) -> list[object]:
            return []

    rollout = recorded(Sleeps(), recorder)  # type: ignore[arg-type]
    requests = [GenerateRequest((1,), 1, seed=seed) for seed in range(20)]
    await asyncio.gather(*map(rollout.generate, requests[:10]), rollout.update_adapter(adapter(1)))
    await asyncio.gather(*map(rollout.generate, requests[10:]))
    recorder.close()
    assert rollout.capabilities == {Capability.BASE}
    assert rollout.inventory_bound == 3  # type: ignore[attr-defined]
    (found,) = read(tmp_path / "history.jsonl")
    assert all(e.completion.token_ids == (e.request.seed,) for e in found.exchanges)
    assert [e.request.seed for e in found.exchanges] != sorted(range(20))
    overtaken = [e for e in found.exchanges if found.served(e).later]
    assert {e.request.seed for e in overtaken} <= set(range(10))
    assert all(found.served(e).at_start == (1,) for e in found.exchanges if (e.request.seed or 0) >= 10)


def cut(lines: list[str]) -> str:
    return "\n".join(lines)[:-20]


def without(number: int, name: str):
    def change(lines: list[str]) -> str:
        line = json.loads(lines[number])
        del line[name]
        return "\n".join([*lines[:number], json.dumps(line), *lines[number + 1 :]]) + "\n"

    return change


def replaced(number: int, old: str, new: str):
    def change(lines: list[str]) -> str:
        assert old in lines[number]
        return "\n".join([*lines[:number], lines[number].replace(old, new), *lines[number + 1 :]]) + "\n"

    return change


BAD = {
    "cut": (cut, "line 18: the last line is cut off, as when the run was killed; delete it"),
    "empty": (lambda lines: "", "is empty: a history begins with the event 'rollout started'"),
    "foreign": (lambda lines: "step,loss\n1,2.5\n", "line 1: not JSON"),
    "values": (lambda lines: "1\n2\n", "line 1: not a JSON object, but 1"),
    "other JSON": (
        lambda lines: '{"loss": 2}\n',
        "line 1: the first line has to be the event 'rollout started'",
    ),
    "headless": (lambda lines: "\n".join(lines[1:]), "line 1: the first line has to be the event"),
    "newer": (
        replaced(0, '"format": 1', '"format": 7'),
        "line 1: the format is 7; this version of rollproof",
    ),
    "dtype": (replaced(0, "bfloat16", "int8"), "line 1: dtype is 'int8'; allowed: float32"),
    "policy": (replaced(0, "continue-mixed", "drop"), "line 1: in_flight is 'drop'; allowed: finish-on-old"),
    "lost": (lambda lines: "\n".join([*lines[:2], *lines[3:]]), "line 3: its tick is 3, where 2 has to come"),
    "answers": (
        replaced(3, '"started": 2', '"started": 1'),
        "line 4: a request ends that did not start at tick 1",
    ),
    "updates": (
        replaced(4, '"started": 1', '"started": 0'),
        "line 5: an update to version 1 ends that did not",
    ),
    "backwards": (
        replaced(3, '"tick": 3', '"tick": 2'),
        "line 4: its tick is 2, where 3 has to come: lines are",
    ),
    "swapped": (
        lambda lines: "\n".join([lines[0], lines[2], lines[1]]),
        "line 2: its tick is 2, where 1 has to come",
    ),
    "no tick": (without(3, "tick"), "line 4: 'tick' is missing"),
    "no version": (without(1, "version"), "line 2: 'version' is missing"),
    "no tokens": (replaced(3, "token_ids", "tokens"), "line 4: 'token_ids' is missing"),
    "no prompt": (replaced(2, "[1, 2, 3]", "[]"), "line 3: prompt_token_ids is empty"),
    "text": (replaced(2, "[1, 2, 3]", '"Hello"'), "line 3: 'prompt_token_ids' is 'Hello', which is no list"),
    "word": (replaced(2, "[1, 2, 3]", '[1, "a"]'), "line 3: 'prompt_token_ids'[1] is 'a'"),
    "unequal": (replaced(3, "[4, 5]", "[4, 5, 6]"), "line 4: 2 logprobs for 3 tokens"),
    "more": (
        lambda lines: "\n".join([*lines, lines[-1].replace("17", "18", 1)]),
        "after the event 'record closed'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_whole_history_is_refused(
    name: str, tmp_path: Path, recorder: Recorder, adapter: MakeAdapter
):
    run(recorder, adapter)
    path = tmp_path / "history.jsonl"
    change, message = BAD[name]
    path.write_text(change(path.read_text().splitlines()))
    with pytest.raises(HistoryError) as told:
        read(path)
    assert message in str(told.value)
    assert str(told.value).startswith(str(path))
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path):
    with pytest.raises(HistoryError, match="no history can be read from .*: No such file or directory"):
        read(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HistoryError, match="is not text"):
        read(tmp_path / "binary")


def test_a_run_that_was_killed_is_read_without_its_last_line(
    tmp_path: Path, recorder: Recorder, adapter: MakeAdapter
):
    run(recorder, adapter)
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert not read(path)[0].closed


def test_each_rollout_of_a_file_has_a_history_of_its_own(
    tmp_path: Path, recorder: Recorder, adapter: MakeAdapter
):
    run(recorder, adapter)
    path = tmp_path / "history.jsonl"
    path.write_text(2 * path.read_text())
    one, two = read(path)
    assert (one.life, two.life) == (1, 2)
    assert one.exchanges == two.exchanges
