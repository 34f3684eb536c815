"""The plugin's options: one for each setting, and those for the rollout, the report and the list."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from .settings import MADE, Settings

_HELP = {
    "model": f"Hugging Face folder to judge with, or a model to make on the spot: {', '.join(MADE)}",
    "dtype": "float32, bfloat16 or float16, asked of the rollout",
    "seed": "seed of prompts, adapters and the made model",
    "max_lora_rank": "highest rank the rollout has to accept",
    "max_model_len": "tokens of prompt and completion together",
    "max_num_seqs": "requests the rollout has to run at once",
    "oracle_device": "torch device for the merged-weight model",
    "deadline_scale": "multiplies every deadline",
    "profile": "core, or full: the clauses that take long too",
    "baseline": "TOML file with the clauses that are known to fail: a [CLAUSE] table with a reason each",
}


def add(parser: pytest.Parser) -> None:
    """Add them to pytest's own."""
    group = parser.getgroup("rollproof", "judging an RL rollout")
    group.addoption("--rollout", metavar="PKG.MOD:FACTORY[,KEY=VALUE]", help="the rollout to judge")
    group.addoption("--report", metavar="DIR", type=Path, help="write report.json, .md, junit.xml here")
    group.addoption("--only", metavar="ID[,ID]", default="", help="these clauses, and those they require")
    group.addoption("--list", action="store_true", help="print every clause, the chosen ones marked")
    for field in fields(Settings):
        if field.name != "only":
            option = f"--{field.name.replace('_', '-')}"
            help_text = f"{_HELP[field.name]} (default: {field.default or 'see above'})"
            group.addoption(option, type=type(field.default), default=field.default, help=help_text)


def settings(config: pytest.Config) -> Settings:
    """What the command line asks for. Raises SettingsError."""
    only = tuple(filter(None, config.getoption("only").split(",")))
    names = [field.name for field in fields(Settings) if field.name != "only"]
    return Settings(only=only, **{name: config.getoption(name) for name in names})
