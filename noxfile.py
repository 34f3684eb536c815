"""The project's sessions. ``nox -s conformance`` judges a rollout, ``nox -s tests`` tests the project.

Where the environment already has everything, vLLM for its GPU included: ``nox --no-venv -s ...``.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "typecheck", "tests"]

DEFAULT = "rollproof_reference:make"

CLAUSES = (
    *("-m", "pytest", "--pyargs", "rollproof.clauses", "-p", "no:cacheprovider"),
    # This repository's own settings and fixtures are for its own tests.
    *("-c", os.devnull, "--rootdir", ".", "--noconftest"),
)


def install(session: nox.Session, *extras: str, groups: tuple[str, ...] = ()) -> None:
    """Install the project into the session's environment, torch for the CPU unless there is a GPU."""
    if session.venv_backend == "none":
        return
    command = ["install"]
    env = {}
    if wheels := os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS"):
        env["UV_FIND_LINKS"] = wheels.replace(" ", ",")  # where the user keeps a build of torch
    elif "cpu" in extras:
        command += ["--torch-backend", "cpu"]
    for group in groups:
        command += ["--group", group]
    project = f".[{','.join(extras)}]" if extras else "."
    session.run_install("uv", "pip", *command, project, env=env, external=True)


def engine() -> str:
    """The extra that holds the engine for this machine."""
    return "gpu" if shutil.which("nvidia-smi") else "cpu"


def environment() -> dict[str, str]:
    """Nothing here may reach a model hub, and an engine says only what went wrong."""
    return {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}


def single() -> dict[str, str]:
    """One thread each: on models as small as the default, threads only wait for each other."""
    alone = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {name: os.environ.get(name, value) for name, value in alone.items()}


def given(posargs: list[str], option: str) -> bool:
    """Whether an option is among the arguments, in either way to write it."""
    return any(item == option or item.startswith(f"{option}=") for item in posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Judge a rollout: ``nox -s conformance -- --rollout pkg.mod:factory`` (default: the reference)."""
    args = list(session.posargs)
    if "--list" in args:  # of the clauses: nothing is judged
        install(session, engine())
        session.run("python", *CLAUSES, *args, env=environment())
        return
    chosen = given(args, "--rollout")
    judged = (
        "judged: the rollout named by --rollout" if chosen else "judged: rollproof_reference, the default"
    )
    session.log(judged)
    install(session, engine())
    if not chosen:
        args += ["--rollout", DEFAULT]
    if not given(args, "--report"):
        args += ["--report", "rollproof-report"]
    threads = {} if given(args, "--model") else single()
    try:
        session.run("python", *CLAUSES, "-v", *args, env=environment() | threads)
    finally:
        session.log(judged)


@nox.session
def tests(session: nox.Session) -> None:
    """The project's own tests, known-bad rollouts included."""
    install(session, engine(), groups=("test",))
    # Each process has an engine of its own, on one core.
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs, env=environment())


@nox.session
def known_bad(session: nox.Session) -> None:
    """Which known-bad rollout fails which clause: printed, and written to conformance/KILLS.md."""
    install(session, engine(), groups=("test",))
    session.run(
        *("python", "-m", "pytest", "tests/test_known_bad.py", "--kills", "conformance/KILLS.md"),
        *("-n", "2"),  # each with an engine of its own, on one core
        *session.posargs,
        env=environment(),
    )


@nox.session
def false_alarms(session: nox.Session) -> None:
    """How often a right rollout fails, in ``-- --runs N`` runs (100) of each; hours long, so not in CI."""
    install(session, engine(), groups=("test",))
    session.run("python", "tests/false_alarms.py", *session.posargs, env=environment())


@nox.session
def sensitivity(session: nox.Session) -> None:
    """The smallest fault that each clause about numbers catches, put into SPEC.md; no engine, 15 minutes."""
    install(session, "cpu", groups=("test",))
    session.run("python", "tests/sensitivity.py", *session.posargs, env=environment())


@nox.session
def families(session: nox.Session) -> None:
    """The reference on every made family in every dtype, and a table: ``nox -s families -- --only NUM``.

    Slow, and no part of the checks that each change has to pass.
    """
    install(session, engine())
    gpu = engine() == "gpu"
    # vLLM's LoRA kernels refuse float32 on a GPU; its CPU build starts no mixture of experts with LoRA.
    dtypes = ("bfloat16", "float16") if gpu else ("float32", "bfloat16", "float16")
    models = ["tiny-qwen2", "tiny-llama", "tiny-qwen3", "tiny-gemma3", *(["tiny-qwen3-moe"] if gpu else [])]
    rows = []
    for model in models:
        for dtype in dtypes:
            folder = pathlib.Path("rollproof-families", f"{model}-{dtype}")
            shutil.rmtree(folder, ignore_errors=True)
            session.run(
                *("python", *CLAUSES, "-q", "--rollout", DEFAULT),
                *("--model", model, "--dtype", dtype, "--report", str(folder), *session.posargs),
                env=environment() | single(),
                success_codes=range(6),  # the table says how each came out
            )
            rows.append((model, dtype, _verdict(folder / "report.json")))
    for model, dtype, verdict in rows:
        session.log(f"{model:16} {dtype:10} {verdict}")
    if not all(verdict.startswith("conforms") for *_, verdict in rows):
        session.error("the reference does not conform on every family")


def _verdict(file: pathlib.Path) -> str:
    """How a run came out, from its report: in words, with the clauses that went wrong."""
    if not file.is_file():
        return "no report: it did not come to a clause"
    report = json.loads(file.read_text(encoding="utf-8"))
    counts = ", ".join(f"{count} {name}" for name, count in report["totals"].items() if count)
    bad = [r["clause"] for r in report["results"] if r["outcome"] in ("fail", "error")]
    return f"{'conforms' if report['ok'] else 'does not conform'} ({counts}) {' '.join(bad)}".rstrip()


@nox.session
def benchmarks(session: nox.Session) -> None:
    """What updates cost: on the CPU with a tiny model, or ``-- --device cuda --size 7b``."""
    install(session, engine(), groups=("test",))
    session.run(
        *("python", "-m", "pytest", "benchmarks", "-p", "no:cacheprovider"),
        *("--benchmark-columns", "min,median,max,rounds", "--benchmark-group-by", "func"),
        *session.posargs,
        env=environment(),
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    if session.venv_backend != "none":
        session.run_install("uv", "pip", "install", "--group", "lint", external=True)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Types, strictly; engines and model libraries are taken as untyped."""
    install(session, "cpu", groups=("typecheck",))
    session.run("mypy")
