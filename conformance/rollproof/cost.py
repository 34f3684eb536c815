"""What a run will cost, told before anything starts. It knows the settings and the files, no rollout."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from .settings import Settings
from .spec import Clause


def told(settings: Settings, chosen: Sequence[Clause]) -> str:
    """Clauses, starts of the rollout, its calls, and the memory of the oracle, in one line."""
    updates, requests = (sum(clause.calls[kind] for clause in chosen) for kind in (0, 1))
    return (
        f"clauses: {len(chosen)}; starts of the rollout: {starts(chosen)} (more where one breaks it); "
        f"updates: about {updates}; requests: about {requests}; "
        f"oracle: {_memory(settings.model)} on {settings.oracle_device}"
    )


def starts(chosen: Sequence[Clause]) -> int:
    """How often the rollout is started: once, and for each fresh clause that isn't the first to run."""
    return 1 + sum(clause.fresh for clause in chosen[1:])


def parameters(folder: str | Path) -> int | None:
    """How many a Hugging Face folder holds, from the heads of its safetensors; None where it has none."""
    try:
        index = Path(folder, "model.safetensors.index.json")
        names = {"model.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sum(_parameters(Path(folder, name)) for name in names)
    except (OSError, ValueError, LookupError):
        return None


def _parameters(file: Path) -> int:
    with file.open("rb") as stream:
        head = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in head.items() if name != "__metadata__")


def _memory(model: str) -> str:
    from .models import SHAPES, made_parameters
    from .oracle import kept_versions

    shape = model or "tiny-qwen2"
    count = made_parameters(shape) if shape in SHAPES else parameters(model)
    if count is None:
        return "of unknown size, for want of safetensors,"
    size = 4 * count  # float32
    versions = kept_versions(size)
    return f"up to {size * (1 + versions) / 1e9:.2g} GB (float32, base and {versions} merged)"
