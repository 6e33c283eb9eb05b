"""``tierstore-bench peers``: find the installed peers, measure, print, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from tierstore.errors import TierStoreError
from tierstore.units import format_size
from tierstore_tools import machine, report
from tierstore_tools.peers import measure
from tierstore_tools.peers.daemons import CachePeer, version, why_not
from tierstore_tools.peers.measure import PeerPlan, PeersResult, Ratio


def run(plan: PeerPlan, peers: Sequence[CachePeer], *, json: str | None) -> None:
    """Measure our daemon, which is the first of ``peers``, and all that are available. Raises
    :class:`UsageError` for an environment that cannot be run, and :class:`TierStoreError` if a peer fails or
    a load did not return all bytes."""
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
        raise TierStoreError(f"pages were wrong or missing: {', '.join(dict.fromkeys(wrong))}")


def _show(result: PeersResult, left_out: dict[str, str], *, to_stderr: bool) -> None:
    report.table(
        "peers: GB/s of one client, medians of whole rounds; × ours: tierstore's speed over the peer's",
        ("peer", "page", "save", "of memcpy", "× ours", "load", "of memcpy", "× ours", "core-s/GB", "memory"),
        [
            (
                row.peer,
                format_size(row.page_bytes),
                _gb_per_s(row.save_gb_per_s, row.wrong),
                _median(row.save_of_memcpy, report.percent),
                _times(row.save_ours),
                _gb_per_s(row.load_gb_per_s, row.wrong),
                _median(row.load_of_memcpy, report.percent),
                _times(row.load_ours),
                _median(row.core_s_per_gb, report.rate),
                format_size(row.memory_bytes),
            )
            for row in result.moves
        ],
        to_stderr=to_stderr,
    )
    report.table(
        "lookups, and the share of the pages after kill -9",
        ("peer", "tokens", "lookup ms", "× ours", "left after kill -9", "started in"),
        [
            (
                row.peer,
                f"{row.tokens:,}",
                f"{row.lookup_ms.median:.2f}" if row.found == 1 else "failed",
                _times(row.ours if row.found == 1 else None),
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
        console.print(f"{page} pages: each daemon has {given}, {saved} were saved", highlight=False)
    for page_bytes, rate in result.memcpy_gb_per_s.items():
        console.print(f"memcpy, {format_size(page_bytes)} at a time: {_range(rate)} GB/s", highlight=False)
    for name, why in left_out.items():
        console.print(f"left out: {name}: {why}", markup=False, highlight=False)


def _gb_per_s(rate: Ratio | None, failed: int) -> str:
    """Return the median of the rounds that moved all pages, and how many did not."""
    if rate is None:
        return "failed"
    return f"{rate.median:.2f}, {failed} failed" if failed else report.rate(rate.median)


def _median(ratio: Ratio | None, shown: Callable[[float], str]) -> str:
    return "–" if ratio is None else shown(ratio.median)


def _times(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return "1" if ratio.low == ratio.high == 1 else _range(ratio)


def _range(ratio: Ratio) -> str:
    return f"{ratio.median:.1f} ({ratio.low:.1f}–{ratio.high:.1f})"
