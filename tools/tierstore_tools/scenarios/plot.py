"""Draw the results: one panel per scenario."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

if TYPE_CHECKING:
    from tierstore_tools.scenarios.runs import ScenarioResult

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of the backend
from matplotlib.axes import Axes

_HATCHES = ("", "///", "...", "xxx")  # patterns, so that cases can be told apart without colours
_COLOURS = ("#808080", "#00798c", "#edae49", "#d1495b")


def draw(result: ScenarioResult, title: str, path: Path) -> None:
    """Write a PNG."""
    panels: list[Callable[[Axes], None]] = []
    if result.batch:
        panels.append(lambda axes: _batch(axes, result))
    if result.longctx:
        panels.append(lambda axes: _longctx(axes, result))
    if result.online:
        panels.append(lambda axes: _online(axes, result))
    if result.stream:
        panels.append(lambda axes: _stream(axes, result))
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(7 * columns, 4.2 * rows), squeeze=False, layout="constrained"
    )
    for number, cell in enumerate(axes.flat):
        if number < len(panels):
            panels[number](cell)
        else:
            cell.set_axis_off()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _batch(axes: Axes, result: ScenarioResult) -> None:
    bars = axes.barh(
        [row.target for row in result.batch],
        [row.output_tokens_per_s for row in result.batch],
        color=_COLOURS[1],
    )
    axes.bar_label(bars, [f" {row.output_tokens_per_s:.0f}" for row in result.batch])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("generated tokens a second")
    axes.set_title("batch")


def _longctx(axes: Axes, result: ScenarioResult) -> None:
    cells = {(row.target, row.case): row.ttft_s for row in result.longctx}
    _bars(axes, cells, lambda seconds: f" {_seconds(seconds)}")
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, seconds (log)")
    axes.set_title(f"longctx, {result.longctx[0].prompt_tokens:,} tokens")


def _online(axes: Axes, result: ScenarioResult) -> None:
    cells = {(row.target, f"{row.arrivals} {row.rate_per_s:g}/s"): row.goodput_per_s for row in result.online}
    _bars(axes, cells, lambda rate: f" {rate:.2f}")
    axes.set_xlabel("requests that met the SLO, a second")
    axes.set_title("online")


def _stream(axes: Axes, result: ScenarioResult) -> None:
    rounds: dict[tuple[str, str], list[float]] = {}
    for row in result.stream:
        rounds.setdefault((row.target, row.beside), []).append(row.itl_p99_s)
    _bars(
        axes,
        {cell: statistics.median(values) for cell, values in rounds.items()},
        lambda seconds: f" {_seconds(seconds)}",
    )
    axes.set_xlabel("p99 of the time between tokens, seconds")
    axes.set_title("stream")


def _bars(axes: Axes, cells: dict[tuple[str, str], float], label: Callable[[float], str]) -> None:
    """Draw a group of bars per target, one bar per case."""
    targets = list(dict.fromkeys(target for target, _ in cells))
    cases = list(dict.fromkeys(case for _, case in cells))
    width = 0.8 / len(cases)
    for number, case in enumerate(cases):
        at = [(place, target) for place, target in enumerate(targets) if (target, case) in cells]
        values = [cells[target, case] for _, target in at]
        bars = axes.barh(
            [place + (number - (len(cases) - 1) / 2) * width for place, _ in at],
            values,
            width,
            label=case,
            color=_COLOURS[number % len(_COLOURS)],
            hatch=_HATCHES[number // len(_COLOURS) % len(_HATCHES)],
        )
        axes.bar_label(bars, [label(value) for value in values], fontsize=8)
    axes.set_yticks(range(len(targets)), targets)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.legend(fontsize=8)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
