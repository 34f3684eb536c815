"""What a run was asked to do, checked before anything starts. Nothing here is heavy to import."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .protocol import RolloutSpec

DTYPES = ("float32", "bfloat16", "float16")
PROFILES = ("core", "full")

MADE = (
    "tiny-qwen2",
    "tiny-llama",
    "tiny-qwen3",
    "tiny-gemma3",
    "tiny-qwen3-moe",
    "qwen2-0.5b",
    "qwen2-7b",
    "qwen2-32b",
)
"""The shapes in ``models.py``, by name, so that a name can be checked without torch."""


class SettingsError(ValueError):
    """A setting out of bounds. The message is one line."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run; each field is an option of the pytest plugin too.

    ``model`` is a Hugging Face folder, or the name of a model that is made on the spot ("" is
    tiny-qwen2); ``dtype`` is asked of the rollout; ``oracle_device`` is a torch device;
    ``deadline_scale`` multiplies every deadline; ``profile`` is "core", or "full" for the clauses
    that take long too; ``only`` names clauses, and those are run whatever their profile;
    ``baseline`` is a file with those that are known to fail (see ``rollproof.baseline``; "": none).
    """

    model: str = ""
    dtype: str = "float32"
    seed: int = 0
    max_lora_rank: int = RolloutSpec.max_lora_rank
    max_model_len: int = RolloutSpec.max_model_len
    max_num_seqs: int = RolloutSpec.max_num_seqs
    oracle_device: str = "cpu"
    deadline_scale: float = 1.0
    profile: str = "core"
    baseline: str = ""
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.model and self.model not in MADE and not Path(self.model, "config.json").is_file():
            raise SettingsError(
                f"no model at {self.model!r}: it has to be a Hugging Face folder with a config.json, or a "
                f"model made on the spot: {', '.join(MADE)}"
            )
        for name, allowed in (("dtype", DTYPES), ("profile", PROFILES)):
            if (chosen := getattr(self, name)) not in allowed:
                raise SettingsError(f"{name} is {chosen!r}; allowed: {', '.join(allowed)}")
        for name, least in (("max_lora_rank", 1), ("max_model_len", 128), ("max_num_seqs", 1)):
            if (value := getattr(self, name)) < least:
                raise SettingsError(f"{name} is {value}; it has to be at least {least}")
        if self.deadline_scale <= 0:
            raise SettingsError(f"deadline_scale is {self.deadline_scale:g}; it has to be above 0")

    def options(self) -> str:
        """The seed, and what differs from the defaults, as options: what makes a clause fail the same way.

        Without the choice of clauses, and without the baseline: the failure is to be seen.
        """
        default: dict[str, Any] = {field.name: field.default for field in fields(self)}
        del default["only"], default["profile"], default["baseline"]
        return "".join(
            f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
            for name in default
            if (value := getattr(self, name)) != default[name] or name == "seed"
        )
