"""Draw TTFT by tier, and TTFT against prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from tierstore_tools.longctx.cases import LongContextResult, LongContextRow, SweepRow

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of the backend
from matplotlib.axes import Axes

_COLOURS = {
    "store_off": "#b0b0b0",
    "cold": "#808080",
    "hbm": "#d1495b",
    "host": "#edae49",
    "disk": "#00798c",
    "tail": "#7a5195",
}


def draw(result: LongContextResult, title: str, path: Path) -> None:
    """Write a PNG. A sweep adds a second panel."""
    panels = 2 if result.sweep else 1
    figure, axes = plt.subplots(1, panels, figsize=(7 * panels, 4.2), squeeze=False, layout="constrained")
    _by_tier(axes[0][0], result.rows)
    if result.sweep:
        _by_length(axes[0][1], result.sweep)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _by_tier(axes: Axes, rows: Sequence[LongContextRow]) -> None:
    names = [row.case.replace("_", " ") for row in rows]
    bars = axes.barh(names, [row.ttft_s for row in rows], color=[_COLOURS[row.case] for row in rows])
    labels = [
        f" {_seconds(row.ttft_s)}" + (f"  {row.speedup:.0f}×" if row.reused_tokens else "") for row in rows
    ]
    axes.bar_label(bars, labels)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("time to first token, seconds (log)")
    axes.set_title(f"{rows[0].prompt_tokens:,} tokens")


def _by_length(axes: Axes, sweep: Sequence[SweepRow]) -> None:
    lengths = [row.prompt_tokens for row in sweep]
    for name in ("cold", "hbm", "host", "disk"):
        times = [float(getattr(row, f"{name}_s")) for row in sweep]
        axes.plot(lengths, times, marker="o", label=name, color=_COLOURS[name])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("prompt tokens (log)")
    axes.set_ylabel("time to first token, seconds (log)")
    axes.set_title("by prompt length")
    axes.legend()


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
