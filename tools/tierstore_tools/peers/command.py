"""``peers`` from the command line: who can be had, measure, show, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tierstore.errors import TierStoreError
from tierstore.units import format_size
from tierstore_tools import machine, report
from tierstore_tools.peers import measure
from tierstore_tools.peers.daemons import CachePeer, version, why_not
from tierstore_tools.peers.measure import PeerPlan, PeersResult, Ratio


def run(plan: PeerPlan, peers: Sequence[CachePeer], *, json: str | None) -> None:
    """Measure our daemon, the first, and those of ``peers`` that can be had. Raises :class:`UsageError` for
    an environment that cannot be run, and :class:`TierStoreError` when a peer fails, or a byte came back
    wrong."""
    report.require_targets(json)
    left_out = {peer.name: why for peer in peers if (why := why_not(peer)) is not None}
    had = [peer for peer in peers if peer.name not in left_out]
    with report.phases() as phases, phases.phase("peers", measurable=False) as phase:
        for peer in had[1:]:
            phase.update(text=f"trying {peer.name}")
            if (why := measure.try_out(peer, plan.directory)) is not None:
                left_out[peer.name] = why
        had = [peer for peer in had if peer.name not in left_out]
        result = measure.run(plan, had, lambda text: phase.update(text=text))
    _show(result, left_out, to_stderr=json == "-")
    document = {
        "machine": machine.describe(),
        "versions": {peer.name: version(peer) for peer in had},
        "left_out": left_out,
        "rounds": plan.rounds,
        **asdict(result),
    }
    report.write_json(document, json)
    wrong = [row.peer for row in result.moves if row.wrong] + [row.peer for row in result.kills if row.wrong]
    if wrong:
        raise TierStoreError(f"bytes came back wrong, or not at all: {', '.join(dict.fromkeys(wrong))}")


def _show(result: PeersResult, left_out: dict[str, str], *, to_stderr: bool) -> None:
    report.table(
        "peers: GB/s of one client, medians of the rounds; × ours: how many times as fast tierstore was",
        ("peer", "page", "save", "of memcpy", "× ours", "load", "of memcpy", "× ours", "core-s/GB", "memory"),
        [
            (
                row.peer,
                format_size(row.page_bytes),
                report.rate(row.save_gb_per_s.median),
                report.percent(row.save_of_memcpy.median),
                _times(row.save_ours),
                report.rate(row.load_gb_per_s.median),
                report.percent(row.load_of_memcpy.median),
                _times(row.load_ours),
                f"{row.core_s_per_gb.median:.2f}",
                format_size(row.memory_bytes),
            )
            for row in result.moves
        ],
        to_stderr=to_stderr,
    )
    report.table(
        "lookups, and what was left after kill -9",
        ("peer", "tokens", "lookup ms", "× ours", "left after kill -9", "started in"),
        [
            (
                row.peer,
                f"{row.tokens:,}",
                f"{row.lookup_ms.median:.2f}",
                _times(row.ours),
                report.percent(kill.left),
                report.seconds(kill.start_s),
            )
            for row, kill in zip(result.lookups, result.kills, strict=True)
        ],
        to_stderr=to_stderr,
    )
    console = report.stderr if to_stderr else report.stdout
    for room in sorted({(row.page_bytes, row.room_bytes, row.saved_bytes) for row in result.moves}):
        page, given, saved = map(format_size, room)
        console.print(f"{page} pages: {given} for pages each, {saved} were saved", highlight=False)
    for page_bytes, rate in result.memcpy_gb_per_s.items():
        console.print(f"memcpy, {format_size(page_bytes)} at a time: {_range(rate)} GB/s", highlight=False)
    for name, why in left_out.items():
        console.print(f"left out: {name}: {why}", markup=False, highlight=False)


def _times(ratio: Ratio) -> str:
    return "1" if ratio.low == ratio.high == 1 else _range(ratio)


def _range(ratio: Ratio) -> str:
    return f"{ratio.median:.1f} ({ratio.low:.1f}–{ratio.high:.1f})"
