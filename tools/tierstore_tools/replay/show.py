"""Show the results of a replay as lines, tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.units import format_size
from tierstore_tools import report
from tierstore_tools.replay.runs import ReplayRow
from tierstore_tools.replay.tiered import TieredRow
from tierstore_tools.replay.trace import TraceExtent

_EMPHASIZED = {"lru": ("#808080", 2.0), "default": ("#d1495b", 2.5), "belady": ("#404040", 1.5)}
_COLOURS = ("#00798c", "#edae49", "#7a5195", "#2e8b57", "#bc5090", "#3a86ff", "#8a5a44", "#6a994e")


def one_line(row: ReplayRow | TieredRow) -> str:
    """Return the result of one replay as one line."""
    if isinstance(row, ReplayRow):
        return f"{row.policy}, {row.capacity_blocks} blocks: hit rate {row.hit_rate:.4f}"
    ahead = "with" if row.prefetch else "without"
    return (
        f"{row.policy} through the tiers, {ahead} prefetching: hit rate {row.hit_rate:.4f}, "
        f"TTFT {report.seconds(row.ttft.mean_s)} on average"
    )


def hit_rates(rows: Sequence[ReplayRow], *, title: str, token_bytes: float | None, to_stderr: bool) -> None:
    """Print policies against capacities. The longer list of the two runs downwards in the table."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    capacities = list(dict.fromkeys(row.capacity_blocks for row in rows))
    rates = {(row.policy, row.capacity_blocks): f"{row.hit_rate:.4f}" for row in rows}
    tokens = {row.capacity_blocks: row.capacity_tokens for row in rows}

    def size(blocks: int) -> str:
        held = f"{count(tokens[blocks])} tokens"
        return f"{held}, {format_size(tokens[blocks] * token_bytes)}" if token_bytes else held

    if len(policies) > len(capacities) and len(capacities) < 6:
        columns = ["policy", *(f"{blocks} blocks\n{size(blocks)}" for blocks in capacities)]
        lines = [[policy, *(rates[policy, blocks] for blocks in capacities)] for policy in policies]
    else:
        columns = ["blocks", "holds", *policies]
        lines = [
            [f"{blocks}", size(blocks), *(rates[policy, blocks] for policy in policies)]
            for blocks in capacities
        ]
    heading(title, to_stderr=to_stderr)
    hints = {row.hints for row in rows} - {"none"}
    hinted = f", hints {hints.pop()}" if hints else ""
    report.table(f"hit rate{hinted}", columns, lines, to_stderr=to_stderr)


def tiered(rows: Sequence[TieredRow], *, title: str, to_stderr: bool) -> None:
    """Print the sources of the tokens, the bytes moved, and the times to first token."""
    heading(title, to_stderr=to_stderr)
    report.table(
        "prompt tokens by source, and time to first token",
        ("policy", "prefetch", "HBM", "host", "disk", "computed", "p50", "p90", "p99", "mean"),
        [_waits(row) for row in rows[:1]] + [_hits(row) for row in rows],
        to_stderr=to_stderr,
    )
    columns = (
        "policy",
        "pre-\nfetch",
        "host→\nHBM",
        "disk→\nhost",
        "read\nahead",
        "of it\nused",
        "HBM→\nhost",
    )
    more = ("host→\ndisk", "not\nwritten", "written\nper page", "read per\nwritten")
    report.table("bytes moved", (*columns, *more), [_moved(row) for row in rows], to_stderr=to_stderr)


def _waits(row: TieredRow) -> list[str]:
    waits = row.recompute_ttft
    shares = ["–", "–", "–", "100 %"]
    return [
        "(no store)",
        "–",
        *shares,
        *map(report.seconds, (waits.p50_s, waits.p90_s, waits.p99_s, waits.mean_s)),
    ]


def _hits(row: TieredRow) -> list[str]:
    hits, waits = row.hit_tokens, row.ttft
    parts = (hits.hbm, hits.host, hits.disk, row.input_tokens - hits.hbm - hits.host - hits.disk)
    return [
        row.policy,
        "yes" if row.prefetch else "no",
        *(_share(part, row.input_tokens) for part in parts),
        *map(report.seconds, (waits.p50_s, waits.p90_s, waits.p99_s, waits.mean_s)),
    ]


def _moved(row: TieredRow) -> list[str]:
    moved = row.moved_bytes
    return [
        row.policy,
        "yes" if row.prefetch else "no",
        format_size(moved.host_to_hbm),
        format_size(moved.disk_to_host),
        format_size(moved.prefetched),
        format_size(moved.prefetched_used),
        format_size(moved.hbm_to_host),
        format_size(moved.host_to_disk),
        format_size(moved.not_written),
        f"{row.write_amplification:.2f}",
        f"{row.disk_read_per_written:.2f}",
    ]


def sizes(rows: Sequence[tuple[int, int | None, float | None]], *, title: str, to_stderr: bool) -> None:
    """Print the least time that a page stays, by capacity in tokens and bytes."""
    heading(title, to_stderr=to_stderr)
    report.table(
        "least time that a page stays",
        ("tokens", "bytes", "at least"),
        [
            (
                count(tokens),
                "–" if nbytes is None else format_size(nbytes),
                "–" if turnover_s is None else duration(turnover_s),
            )
            for tokens, nbytes, turnover_s in rows
        ],
        to_stderr=to_stderr,
    )


def heading(text: str, *, to_stderr: bool) -> None:
    """Print one line above the tables; the terminal may wrap it."""
    (report.stderr if to_stderr else report.stdout).print(text, markup=False, highlight=False, soft_wrap=True)


def count(value: float) -> str:
    """Return three digits and a unit of thousands."""
    for suffix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {suffix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that keeps it at 1 or more."""
    for name, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {name}"
    return report.seconds(seconds)


def _share(part: int, of: int) -> str:
    return f"{100 * part / of:.1f} %" if of else "–"


def draw(
    rows: Sequence[ReplayRow], extent: TraceExtent, *, title: str, token_bytes: float | None, path: Path
) -> None:
    """Write a PNG: hit rate against capacity, a line per policy, and the highest possible rate. The
    horizontal axis has the tables' unit: bytes with ``token_bytes``, else tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # after the choice of the backend
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

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
    axes.axhline(extent.ideal, color="#404040", linewidth=1, linestyle=":", label="unlimited capacity")
    axes.set_xscale("log", base=2 if token_bytes else 10)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(LogLocator(base=2) if token_bytes else LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    size = format_size if token_bytes else count
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.25)
    axes.set_xlabel("capacity, bytes" if token_bytes else "capacity, tokens")
    axes.set_ylabel("hit rate, share of prompt blocks")
    axes.set_title(title)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
