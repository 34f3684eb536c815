"""Folders of adapters on a disk that an engine reads, and when each may be deleted.

vLLM may read an adapter's folder again as long as a request runs that began with it, and dies of one
that is gone. So a folder goes only when it was replaced and every request that may read it was answered.
Nothing here knows an engine.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Folders:
    """Numbered folders, below one made in ``parent``, each with the requests that may read it."""

    def __init__(self, parent: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="rollproof-adapters-", dir=parent)).resolve()
        self._names = itertools.count(1)
        self._requests = itertools.count()
        self._running: set[int] = set()
        self._readers: dict[Path, set[int]] = {}
        self._replaced: set[Path] = set()

    def open(self) -> Path:
        """The path of a new folder. Requests that run may come to read it, and so may those that follow."""
        folder = self.root / str(next(self._names))
        self._readers[folder] = set(self._running)
        return folder

    def replaced(self, folder: Path) -> None:
        """No request that begins from now on reads this folder."""
        self._replaced.add(folder)
        for old in [old for old in self._replaced if not self._readers[old]]:
            shutil.rmtree(old, ignore_errors=True)
            self._replaced.discard(old)
            del self._readers[old]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For the length of a request. When the engine ends one that isn't answered is not known."""
        request = next(self._requests)
        self._running.add(request)
        for folder in self._readers.keys() - self._replaced:
            self._readers[folder].add(request)
        try:
            yield
        finally:
            self._running.discard(request)
        for readers in self._readers.values():
            readers.discard(request)

    def clear(self) -> None:
        """Delete them all."""
        shutil.rmtree(self.root, ignore_errors=True)
