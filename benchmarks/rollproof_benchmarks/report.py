"""A table and plots from the results of benchmark runs: ``python -m rollproof_benchmarks.report FOLDER``.

FOLDER holds what ``pytest benchmarks --benchmark-json`` wrote, one file a configuration; README.md and
the plots go beside them. Nothing here measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = {
    "arena": "sync=arena",
    "fold": "sync=fold",
    "ipc tensors": "IPC handles, vLLM's loading",
    "save+load_inplace": "save to tmpfs, load_inplace",
    "save+remove+add": "save to tmpfs, remove, add",
    "disk": "sync=disk",
    "tensors": "sync=tensors",
    "yours": "the rollout given",
}
"""The ways to update, from the fastest on, as a table calls them."""


@dataclass(frozen=True)
class Run:
    """One configuration's results, by test and way."""

    name: str
    results: dict[tuple[str, str], dict[str, Any]]

    @classmethod
    def read(cls, file: Path) -> Run:
        """What pytest-benchmark wrote. Raises ValueError for other files."""
        found = json.loads(file.read_text(encoding="utf-8"))
        if "benchmarks" not in found:
            raise ValueError(f"{file} is no result of pytest-benchmark: it has no 'benchmarks'")
        results = {}
        for item in found["benchmarks"]:
            test, _, way = item["name"].partition("[")
            results[test.removeprefix("test_"), way.rstrip("]")] = item
        return cls(file.stem, results)

    def seconds(self, test: str, way: str) -> list[float] | None:
        """Every round of a test, sorted."""
        item = self.results.get((test, way))
        return sorted(item["stats"]["data"]) if item else None

    def info(self, test: str, way: str) -> dict[str, Any]:
        """What a test said of its own."""
        item = self.results.get((test, way))
        return dict(item["extra_info"]) if item else {}

    def sweep(self) -> list[dict[str, Any]]:
        """What was measured over adapters of many sizes, by their bytes."""
        found = [item["extra_info"] for (test, _), item in self.results.items() if test == "fill_and_copy"]
        return sorted(found, key=lambda info: float(info["adapter bytes"]))

    def throughput(self, way: str) -> float | None:
        """Tokens per second."""
        return self.info("throughput", way).get("throughput")


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values."""
    return ordered[round(share * (len(ordered) - 1))]


def told(run: Run) -> str:
    """One configuration in Markdown."""
    if sweep := run.sweep():
        return _swept(run.name, sweep)
    some = next(iter(run.results.values()))["extra_info"]
    lines = [
        f"## {run.name}",
        "",
        f"{some['device']}, {some['size']} shape, rank {some['rank']}, {some['adapter bytes'] / 1e6:.1f} MB "
        f"in {some['adapter tensors']} tensors ({some['trainer dtype']}, on the {some['trainer device']}); "
        + ", ".join(f"{name} {version}" for name, version in some["versions"].items() if version != "absent"),
        "",
        "| update | acknowledged, median | p95 | first token, median | save+remove+add takes |",
        "|---|---|---|---|---|",
    ]
    slowest = run.seconds("acknowledged", "save+remove+add")
    for way, name in WAYS.items():
        if (times := run.seconds("acknowledged", way)) is None:
            continue
        first = run.seconds("first_token", way)
        ratio = f"{statistics.median(slowest) / statistics.median(times):.1f} times" if slowest else ""
        lines.append(
            f"| {name} | {_ms(statistics.median(times))} | {_ms(percentile(times, 0.95))} | "
            f"{_ms(statistics.median(first)) if first else ''} | {ratio} |"
        )
    return "\n".join([*lines, *_copies(run), *_traffic(run), *_throughputs(run), *_break_even(run), ""])


def _swept(name: str, sweep: list[dict[str, Any]]) -> str:
    """The device's time by an adapter's bytes, and the line through it."""
    lines = [
        f"## {name}",
        "",
        f"{sweep[0]['device']}: filling a half of the arena and copying it, with no engine running.",
        "",
        "| model | rank | MB | fill | copy | fastest copy of as many bytes | copy to that |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {i['model']} | {i['rank']} | {i['adapter bytes'] / 1e6:.1f} | {i['fill_us']:.0f} µs "
            f"| {i['copy_us']:.0f} µs | {i['floor_us']:.0f} µs | {i['copy_us'] / i['floor_us']:.2f} |"
            for i in sweep
        ),
        "",
    ]
    slopes = {what: slope(sweep, what) for what in ("fill_us", "copy_us", "floor_us")}
    for what, told in (("fill_us", "filling"), ("copy_us", "copying")):
        lines.append(
            f"- {told} takes {slopes[what]:.3f} µs per MB more, "
            f"{slopes[what] / slopes['floor_us']:.2f} times the fastest copy."
        )
    return "\n".join([*lines, ""])


def slope(sweep: list[dict[str, Any]], what: str) -> float:
    """Microseconds per MB, by least squares with a constant."""
    x = [info["adapter bytes"] / 1e6 for info in sweep]
    return statistics.linear_regression(x, [info[what] for info in sweep]).slope


def _copies(run: Run) -> list[str]:
    lines = []
    for way in ("arena", "fold"):
        if info := run.info("copy_beside_the_floor", way):
            lines.append(
                f"- On the device sync={way} takes {info['copy_us']:.0f} µs for "
                f"{info['copied_bytes'] / 1e6:.0f} MB written, {info['copy_to_floor']:.2f} times the fastest "
                f"copy of as many bytes ({info['floor_us']:.0f} µs)."
            )
    if parts := run.info("where_the_time_goes", "arena"):
        told = ", ".join(
            f"{name} {parts[name]['median_ms']:.2f} ms"
            for name in ("prepare", "empty call", "another", "commit")
        )
        lines.append(f"- An arena update in its parts (medians): {told}.")
    return ["", *lines] if lines else []


def _traffic(run: Run) -> list[str]:
    rows = []
    for way, name in WAYS.items():
        if info := run.info("longest_gap", way):
            rows.append(
                f"| {name} | {info['longest_gap_ms']:.1f} ms | {info['longest_gap_with_updates_ms']:.1f} ms "
                f"| {info['longest_gap_ratio']:.2f} | {info['updates']['median_ms']:.1f} ms "
                f"| {info['throughput']:,.0f} | {info['throughput_with_updates']:,.0f} "
                f"| {info['tokens_lost']} |"
            )
    if not rows:
        return []
    return [
        "",
        "Under many requests at once, with an update every 50 ms and without:",
        "",
        "| update | longest gap without | with | ratio | update, median | tokens/s without | with | lost |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def _throughputs(run: Run) -> list[str]:
    merged = run.throughput("merged")
    names = {
        "merged": "an engine without LoRA (merged weights)",
        "fold": "sync=fold",
        "base": "base requests on an engine with LoRA",
        "adapter": "adapter requests",
        "oversized": "adapter requests, max_lora_rank eight times the rank",
    }
    rows = [
        f"| {name} | {found:,.0f} | {f'{found / merged:.2f}' if merged else ''} |"
        for way, name in names.items()
        if (found := run.throughput(way)) is not None
    ]
    lines = ["", "| generation | tokens/s | of merged |", "|---|---|---|", *rows] if rows else []
    if turns := run.info("fold_beside_merged", "merged"):
        lines += [
            "",
            f"- By turns, the median of {turns['turns']}: sync=fold gives {turns['fold_to_merged']:.3f} of "
            f"the tokens that an engine with merged weights gives ({turns['fold']:,.0f} and "
            f"{turns['merged']:,.0f} a second).",
        ]
    return lines


def costs(run: Run) -> dict[str, tuple[float, float]]:
    """For each way that can be compared: seconds that an update keeps an engine, and tokens per second."""
    found = {}
    for way, update, generation in (
        ("arena", "acknowledged", "adapter"),
        ("fold", "acknowledged", "fold"),
        ("full push", "full_push", "merged"),
    ):
        times = run.seconds(update, "merged" if update == "full_push" else way)
        rate = run.throughput(generation)
        if times and rate:
            # An update returns once its copy is queued, and the next step waits for that.
            copying = run.info("copy_beside_the_floor", way).get("copy_us", 0) / 1e6
            found[way] = max(statistics.median(times), copying), rate
    return found


def break_even(slow: tuple[float, float], fast: tuple[float, float]) -> float:
    """How many tokens per update make up for a longer update with a higher rate."""
    return (fast[0] - slow[0]) / (1 / slow[1] - 1 / fast[1])


def _break_even(run: Run) -> list[str]:
    found = costs(run)
    lines = []
    for slow, fast in (("arena", "fold"), ("arena", "full push"), ("fold", "full push")):
        if slow in found and fast in found:
            if found[slow][1] >= found[fast][1]:
                lines.append(f"- {slow} is never behind {fast}: it updates and generates faster.")
            else:
                tokens = break_even(found[slow], found[fast])
                lines.append(f"- {fast} is ahead of {slow} from {tokens:,.0f} tokens per update on.")
    return ["", "Tokens of all requests together between two updates:", "", *lines] if lines else []


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def plot_updates(runs: Iterable[Run], file: Path) -> bool:
    """How long an update takes, each way, on a logarithmic axis."""
    import matplotlib.pyplot as plt

    shown = [run for run in runs if run.seconds("acknowledged", "arena")]
    if not shown:
        return False
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    ways = [way for way in WAYS if any(run.seconds("acknowledged", way) for run in shown)]
    height = 0.8 / len(shown)
    for index, run in enumerate(shown):
        for row, way in enumerate(ways):
            if times := run.seconds("acknowledged", way):
                median = statistics.median(times)
                place = row + index * height
                label = run.name if row == 0 else None
                axes.barh(place, 1e3 * median, height, color=f"C{index}", label=label)
                axes.annotate(f" {_ms(median)}", (1e3 * median, place), va="center", fontsize=8)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(ways))], [WAYS[way] for way in ways])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_xlabel("update_adapter() to its return, median, ms (logarithmic)")
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)
    return True


def plot_break_even(run: Run, file: Path) -> bool:
    """Tokens per second in all, by how many are generated between two updates."""
    import matplotlib.pyplot as plt

    found = costs(run)
    if len(found) < 2:
        return False
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    tokens = [10 ** (exponent / 20) for exponent in range(20, 141)]
    for way, (seconds, rate) in found.items():
        axes.plot(tokens, [n / (seconds + n / rate) for n in tokens], label=way)
    axes.set_xscale("log")
    axes.set_xlabel("tokens of all requests between two updates (logarithmic)")
    axes.set_ylabel("tokens per second, updates included")
    axes.set_title(run.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)
    return True


def main() -> None:
    """Write README.md and the plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs = [Run.read(file) for file in sorted(folder.glob("*.json"))]
    parts = ["# What an update costs", "", "Written by `python -m rollproof_benchmarks.report`.", ""]
    if plot_updates(runs, folder / "updates.png"):
        parts += ["![How long an update takes, by way and configuration](updates.png)", ""]
    for run in runs:
        parts.append(told(run))
        if plot_break_even(run, folder / f"{run.name}-break-even.png"):
            parts += [f"![Tokens per second by tokens per update]({run.name}-break-even.png)", ""]
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
