"""Reading history.jsonl back, as ``history`` wrote it.

Whatever isn't a record of calls, from foreign files to one that was cut off, is refused in one line that
says where. Nothing here knows an adapter's tensors or judges anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .candidates import BASE
from .history import FORMAT, History, Unanswered, Update
from .protocol import IN_FLIGHT, Capability, Completion, GenerateRequest
from .settings import DTYPES


class HistoryError(ValueError):
    """A record that can't be read, or not be judged. The message is one line."""


def read(path: str | Path) -> list[History]:
    """The record of each rollout in a file, in their order. Raises HistoryError."""
    histories: list[History] = []
    for number, line in _lines(Path(path)):
        try:
            if line.get("event") == "rollout started":
                histories.append(_begun(line, len(histories) + 1))
            elif not histories:
                raise _UnfitError("the first line has to be the event 'rollout started': this is no history")
            _take(histories[-1], line)
        except _UnfitError as reason:
            raise HistoryError(f"{path}, line {number}: {reason}") from None
    if not histories:
        raise HistoryError(f"{path} is empty: a history begins with the event 'rollout started'")
    return histories


class _UnfitError(Exception):
    """What is wrong with a line."""


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HistoryError(f"no history can be read from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HistoryError(f"{path} is not text: a history is a file of JSON lines") from None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) > 1 and not text.endswith("\n"):
                raise HistoryError(
                    f"{path}, line {number}: the last line is cut off, as when the run was killed; delete it "
                    "to have the lines before it judged"
                ) from None
            raise HistoryError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(value, dict):
            raise HistoryError(f"{path}, line {number}: not a JSON object, but {line[:40]}")
        yield number, value


def _begun(line: dict[str, Any], life: int) -> History:
    if (version := line.get("format")) != FORMAT:
        raise _UnfitError(f"the format is {version!r}; this version of rollproof reads {FORMAT}")
    dtype, declared = _of(line, "dtype", str), line.get("in_flight")
    if dtype not in DTYPES:
        raise _UnfitError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    if declared is not None and declared not in IN_FLIGHT:
        raise _UnfitError(f"in_flight is {declared!r}; allowed: {', '.join(IN_FLIGHT)}, null")
    in_flight = None if declared is None else Capability(declared)
    return History(dtype=dtype, in_flight=in_flight, life=life, _tick=_of(line, "tick", int))


def _take(history: History, line: dict[str, Any]) -> None:
    event, tick = _of(line, "event", str), _of(line, "tick", int)
    if tick != history._tick:
        raise _UnfitError(
            f"its tick is {tick}, where {history._tick} has to come: lines are missing or out of order"
        )
    history._tick = tick + 1
    if history.closed:
        raise _UnfitError("it comes after the event 'record closed'")
    if event == "update started":
        version, digest = _of(line, "version", int), _of(line, "digest", str)
        history.updates.append(Update(version, tick, digest=digest))
    elif event == "unload started":
        history.updates.append(Update(BASE, tick))
    elif event == "update ended":
        _update(history, line).ended = tick
    elif event == "request started":
        history.running[tick] = _request(_of(line, "request", dict)), _of(line, "samples", int)
    elif event == "request ended":
        started, request = _running(history, line)
        history._answered(request, started, _completion(_of(line, "completion", dict)), tick)
    elif event == "request failed":
        started, request = _running(history, line)
        del history.running[started]
        history.unanswered.append(Unanswered(request, started, tick, _of(line, "error", str)))
    elif event == "record closed":
        history.closed = True


def _update(history: History, line: dict[str, Any]) -> Update:
    started, version = _of(line, "started", int), _of(line, "version", int)
    for update in history.updates:
        if (update.started, update.version, update.ended) == (started, version, None):
            update.error = None if line.get("error") is None else _of(line, "error", str)
            return update
    raise _UnfitError(f"an update to version {version} ends that did not start at tick {started}")


def _running(history: History, line: dict[str, Any]) -> tuple[int, GenerateRequest]:
    started = _of(line, "started", int)
    if started not in history.running:
        raise _UnfitError(f"a request ends that did not start at tick {started}, or has ended before")
    return started, history.running[started][0]


def _request(found: dict[str, Any]) -> GenerateRequest:
    seed = found.get("seed")
    prompt = tuple(_each(found, "prompt_token_ids", int))
    if not prompt:
        raise _UnfitError("prompt_token_ids is empty")
    return GenerateRequest(
        prompt_token_ids=prompt,
        max_tokens=_of(found, "max_tokens", int),
        temperature=_of(found, "temperature", int | float),
        seed=seed if seed is None else _of(found, "seed", int),
        adapter=_of(found, "adapter", bool),
        route=_of(found, "route", str),
    )


def _completion(found: dict[str, Any]) -> Completion:
    tokens = tuple(_each(found, "token_ids", int))
    logprobs = None if found.get("logprobs") is None else tuple(_each(found, "logprobs", int | float))
    if logprobs is not None and len(logprobs) != len(tokens):
        raise _UnfitError(f"{len(logprobs)} logprobs for {len(tokens)} tokens")
    cached, spans = found.get("num_cached_tokens"), found.get("version_spans")
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=_of(found, "finish_reason", str),
        num_cached_tokens=cached if cached is None else _of(found, "num_cached_tokens", int),
        version_spans=None if spans is None else tuple(map(tuple, _each(found, "version_spans", list))),
    )


def _of(found: dict[str, Any], name: str, kind: Any) -> Any:
    if name not in found:
        raise _UnfitError(f"{name!r} is missing")
    value = found[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _UnfitError(f"{name!r} is {value!r:.40}, which is no {getattr(kind, '__name__', 'number')}")
    return value


def _each(found: dict[str, Any], name: str, kind: Any) -> list[Any]:
    values: list[Any] = _of(found, name, list)
    for index, value in enumerate(values):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _UnfitError(f"{name!r}[{index}] is {value!r:.40}")
    return values
