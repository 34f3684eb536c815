"""Turning ``pkg.mod:factory,key=value`` into something that starts rollouts."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from .protocol import Rollout, RolloutFactory, RolloutSpec

_FORM = "write it as --rollout pkg.mod:factory or --rollout pkg.mod:factory,key=value"


class FactoryError(ValueError):
    """A ``--rollout`` value that names nothing callable. The message is one line."""


@dataclass(frozen=True)
class Target:
    """A named rollout factory with its options, ready to start."""

    text: str
    factory: RolloutFactory
    options: dict[str, str] = field(default_factory=dict)

    def start(self, spec: RolloutSpec) -> AbstractAsyncContextManager[Rollout]:
        """A context in which one rollout runs."""
        return self.factory(spec, **self.options)


def load(text: str) -> Target:
    """Import what ``text`` names, looking in the current folder too.

    Raises FactoryError when it is misspelt, can't be imported, or isn't callable.
    """
    path, *pairs = text.split(",")
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise FactoryError(f"--rollout {text!r} names no factory: {_FORM}")
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key.isidentifier() and equals):
            raise FactoryError(f"--rollout {text!r}: {pair!r} is not key=value: {_FORM}")
        if key in options:
            raise FactoryError(f"--rollout {text!r}: the option {key!r} is given twice")
        options[key] = value
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a foreign module raises while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise FactoryError(f"--rollout {text!r} can't be imported: {reason}") from error
    if not callable(found):
        raise FactoryError(f"--rollout {text!r} is a {type(found).__name__}, not callable: {_FORM}")
    return Target(text, found, options)
