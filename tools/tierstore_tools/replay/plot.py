"""The picture: hit rate against capacity, a line per policy, and the most that any could reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from tierstore_tools.replay.runs import Row
from tierstore_tools.replay.trace import Extent

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend has to be chosen first
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

_EMPHASIZED = {"lru": ("#808080", 2.0), "default": ("#d1495b", 2.5), "belady": ("#404040", 1.5)}
_COLOURS = ("#00798c", "#edae49", "#7a5195", "#2e8b57", "#bc5090", "#3a86ff", "#8a5a44", "#6a994e")


def draw(rows: Sequence[Row], extent: Extent, *, title: str, token_bytes: float | None, path: Path) -> None:
    """Write a PNG. With ``token_bytes`` the axis below is in bytes, else in tokens."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    colours = iter(_COLOURS * (1 + len(rows) // len(_COLOURS)))
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((row.capacity_tokens, row.hit_rate) for row in rows if row.policy == policy)
        colour, width = _EMPHASIZED.get(policy) or (next(colours), 1.5)
        axes.plot(
            [tokens * (token_bytes or 1) for tokens, _ in points],
            [rate for _, rate in points],
            marker="o",
            markersize=4,
            label=policy,
            color=colour,
            linewidth=width,
            linestyle="--" if policy == "belady" else "-",
        )
    axes.axhline(extent.ideal, color="#404040", linewidth=1, linestyle=":", label="nothing ever forgotten")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    unit = "B" if token_bytes else ""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{_thousands(value)}{unit}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.25)
    axes.set_xlabel("capacity, bytes" if token_bytes else "capacity, tokens")
    axes.set_ylabel("hit rate, share of prompt blocks")
    axes.set_title(title)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _thousands(value: float) -> str:
    for suffix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:g} {suffix}"
    return f"{value:g} "
