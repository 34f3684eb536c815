"""Recording a training run, so that ``rollproof judge`` can judge it when no engine runs any more.

Knows neither the trainer nor its engine: the trainer says what it asks and what comes back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .history import History, Update
from .protocol import IN_FLIGHT, Adapter, Capability, Completion, GenerateRequest, LoadedAdapter, Rollout
from .settings import DTYPES


class Recorder:
    """The record of one run: ``path`` is a new file of JSON lines, ``adapters`` a folder for the adapters.

    ``dtype`` is what the engine computes with; ``in_flight`` is what becomes of requests that an update
    overtakes ("finish-on-old", "continue-mixed", "restart" or "abort-in-flight"; None: not said).

    An update costs a digest of the adapter and a file of its size; a request costs its tokens as text.
    Both happen in the calling thread: use it from one thread, which may run many requests at once.
    Where recording fails, as on a full disk, the record ends with a warning and the training goes on.
    After ``close`` nothing is recorded, so that a run can be recorded for its first steps alone.

    Raises FileExistsError where ``path`` exists, and ValueError for an unknown dtype or policy.
    """

    def __init__(
        self, path: str | Path, adapters: str | Path, *, dtype: str, in_flight: str | None = None
    ) -> None:
        for what, value, allowed in (("dtype", dtype, DTYPES), ("in_flight", in_flight, (*IN_FLIGHT, None))):
            if value not in allowed:
                raise ValueError(f"{what} is {value!r}; allowed: {', '.join(map(str, allowed))}")
        if Path(path).exists():
            raise FileExistsError(f"{path} exists: record each run into a file of its own")
        self._adapters = Path(adapters)
        stream = Path(path).open("x", encoding="utf-8")  # noqa: SIM115 - it is closed by close()
        self._history: History | None = History(stream=stream)
        self._history.begin(dtype, None if in_flight is None else Capability(in_flight))

    @contextmanager
    def update(self, adapter: Adapter) -> Iterator[None]:
        """Around what gives the engine an adapter; what it raises is a refusal, and is raised again."""
        started = self._kept(lambda history: history.update_started(adapter))
        self._kept(lambda history: save(adapter, self._adapters))
        with self._until_ended(started):
            yield

    @contextmanager
    def unload(self) -> Iterator[None]:
        """Around what takes the adapter away, so that the base model serves again."""
        with self._until_ended(self._kept(lambda history: history.unload_started())):
            yield

    @contextmanager
    def _until_ended(self, update: Update | None) -> Iterator[None]:
        refusal: BaseException | None = None
        try:
            yield
        except BaseException as error:
            refusal = error
            raise
        finally:
            if update is not None:
                self._kept(lambda history: history.update_ended(update, refusal))

    @contextmanager
    def request(self, request: GenerateRequest, samples: int = 1) -> Iterator[Callable[[Completion], None]]:
        """Around one request: call what it gives with the completion, or with each of ``samples``.

        What is raised inside, or a block that ends without them, is recorded as a request that failed.
        """
        started = self._kept(lambda history: history.request_started(request, samples))
        left = samples

        def answer(completion: Completion) -> None:
            nonlocal left
            if not isinstance(completion, Completion):
                raise TypeError(f"answer() takes a rollproof.Completion, not a {type(completion).__name__}")
            left -= 1
            if started is not None:
                self._kept(lambda history: history.request_ended(request, started, completion))

        failure: BaseException = RuntimeError("the block ended without an answer")
        try:
            yield answer
        except BaseException as error:
            failure = error
            raise
        finally:
            if left > 0 and started is not None:
                self._kept(lambda history: history.request_failed(request, started, failure))

    def close(self) -> None:
        """End the record. A request that is still running counts as one that never ended."""
        self._kept(lambda history: history.close())
        self._end()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _kept(self, note: Callable[[History], Any]) -> Any:
        """Record, if the record is still open; a record that can't be kept ends here."""
        if self._history is None:
            return None
        try:
            return note(self._history)
        except Exception as error:
            self._end()
            message = f"rollproof records no more of this run: {type(error).__name__}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
            return None

    def _end(self) -> None:
        history, self._history = self._history, None
        if history is not None and history.stream is not None:
            with suppress(OSError):
                history.stream.close()


def save(adapter: Adapter, folder: Path) -> None:
    """Keep an adapter under its version; one that came before with other tensors keeps its place.

    A version that was refused may come again with others, which then lie under version and digest.
    """
    path = folder / str(adapter.version)
    if not path.exists():
        adapter.save(path)
    elif Adapter.load(path, adapter.version).digest() != (digest := adapter.digest()):
        adapter.save(folder / f"{adapter.version}-{digest[:16]}")


class _Recorded:
    """A rollout with a recorder around its calls."""

    def __init__(self, rollout: Any, recorder: Recorder) -> None:
        self._rollout = rollout
        self._recorder = recorder

    @property
    def capabilities(self) -> frozenset[Capability]:
        found: frozenset[Capability] = self._rollout.capabilities
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        with self._recorder.request(request) as answer:
            completion: Completion = await self._rollout.generate(request)
            answer(completion)
        return completion

    async def generate_n(self, request: GenerateRequest, n: int) -> Sequence[Completion]:
        with self._recorder.request(request, n) as answer:
            completions: Sequence[Completion] = await self._rollout.generate_n(request, n)
            for completion in completions:
                answer(completion)
        return completions

    async def update_adapter(self, adapter: Adapter) -> None:
        with self._recorder.update(adapter):
            await self._rollout.update_adapter(adapter)

    async def loaded_adapters(self) -> Sequence[LoadedAdapter]:
        found: Sequence[LoadedAdapter] = await self._rollout.loaded_adapters()
        return found

    async def unload_adapter(self) -> None:
        with self._recorder.unload():
            await self._rollout.unload_adapter()


def recorded(rollout: Rollout, recorder: Recorder) -> Rollout:
    """A rollout that is the given one, and records every request and update."""
    wrapped: Rollout = _Recorded(rollout, recorder)
    return wrapped
