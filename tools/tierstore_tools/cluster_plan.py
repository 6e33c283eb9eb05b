"""Where a pool shared by many hosts saturates: a small simulation from measured costs.

Requests come to each host at random. A share of them ends beyond what the host holds and asks the master,
which answers one after the other; a share of those finds its pages at some lender and has them sent, over the
lender's link and the host's own. What is found to be reused is published, over the same links. Everything
queues first come, first served; links are full duplex and carry one transfer at a time in each direction. It
says where the queues begin, not what a switch or a kernel does under load."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from tierstore.units import format_size
from tierstore_tools import machine
from tierstore_tools.report import require_targets, stdout, write_json

_SIMULATED_REQUESTS = 20_000
_LOOK_BUDGET_S = 0.003
_WIRE_S = 0.0002  # there and back


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured on a processor: what the master takes to answer, a call and each name of it; what sending and
    taking a byte takes at either end."""

    master_call_s: float
    master_name_s: float
    host_s_per_byte: float
    lender_s_per_byte: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one host. ``asking`` and ``found`` are shares of requests, ``published`` pages for each asked."""

    requests_per_s: float
    tokens: int
    chunk_tokens: int
    page_bytes: int
    asking: float
    found: float
    published: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """What is busy, as shares of its time, and how long things take, in seconds."""

    hosts: int
    master_busy: float
    late_looks: float
    look_p99_s: float
    link_busy: float
    bring_p50_s: float
    bring_p99_s: float
    host_cores: float
    lender_cores: float


class _Links:
    """Of hosts, each with a queue outwards and one inwards."""

    def __init__(self, hosts: int, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._out_free = [0.0] * hosts
        self._in_free = [0.0] * hosts
        self.moved_bytes = 0.0

    def move(self, sender: int, receiver: int, now: float, nbytes: float) -> float:
        """When the last byte has come."""
        took_s = nbytes / self._bytes_per_s
        self.moved_bytes += nbytes
        self._out_free[sender] = max(self._out_free[sender], now) + took_s
        ends = max(self._out_free[sender], self._in_free[receiver] + took_s)
        self._in_free[receiver] = ends
        return ends


def simulate(hosts: int, traffic: Traffic, costs: Costs, *, seed: int = 1) -> Saturation:
    """``hosts`` hosts that all lend, for 20,000 requests."""
    draw = random.Random(seed)
    pages = traffic.tokens // traffic.chunk_tokens
    look_s = costs.master_call_s + pages * costs.master_name_s
    nbytes = pages * traffic.page_bytes
    arrivals = [(draw.expovariate(traffic.requests_per_s), host) for host in range(hosts)]
    heapq.heapify(arrivals)
    master_free = master_busy = 0.0
    links = _Links(hosts, traffic.link_bytes_per_s)
    looks: list[float] = []
    brings: list[float] = []
    now = 0.0
    for _ in range(_SIMULATED_REQUESTS):
        now, host = heapq.heappop(arrivals)
        heapq.heappush(arrivals, (now + draw.expovariate(traffic.requests_per_s), host))
        if draw.random() >= traffic.asking:
            continue
        master_free = max(master_free, now) + look_s
        master_busy += look_s
        looks.append(master_free - now + _WIRE_S)
        if looks[-1] <= _LOOK_BUDGET_S and draw.random() < traffic.found:
            brings.append(links.move(draw.randrange(hosts), host, now, nbytes) - now)
        if draw.random() < traffic.published:
            links.move(host, draw.randrange(hosts), now, nbytes)
    bytes_per_s = links.moved_bytes / now / hosts
    return Saturation(
        hosts,
        min(master_busy / now, 1.0),
        sum(each > _LOOK_BUDGET_S for each in looks) / max(len(looks), 1),
        _percentile(looks, 0.99),
        min(bytes_per_s / traffic.link_bytes_per_s, 1.0),
        _percentile(brings, 0.5),
        _percentile(brings, 0.99),
        bytes_per_s * costs.host_s_per_byte,
        bytes_per_s * costs.lender_s_per_byte,
    )


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def run(hosts: Sequence[int], traffic: Traffic, costs: Costs, *, json: str | None) -> None:
    """Simulate, and print a table."""
    require_targets(json)
    results = [simulate(count, traffic, costs) for count in hosts]
    pages = traffic.tokens // traffic.chunk_tokens
    table = Table(
        title=f"{traffic.requests_per_s:g} requests a second and host, {traffic.tokens:,} tokens "
        f"({pages:,} pages of {format_size(traffic.page_bytes)}), {traffic.asking:.0%} ask, "
        f"{traffic.found:.0%} of these find, links of {format_size(traffic.link_bytes_per_s)}/s",
        title_justify="left",
    )
    for column in (
        "hosts",
        "master",
        "look p99",
        "late",
        "links",
        "bring p50",
        "p99",
        "cores/host",
        "lending",
    ):
        table.add_column(column, justify="right")
    for each in results:
        table.add_row(
            f"{each.hosts:,}",
            f"{each.master_busy:.0%}",
            f"{each.look_p99_s * 1e3:.1f} ms",
            f"{each.late_looks:.0%}",
            f"{each.link_busy:.0%}",
            f"{each.bring_p50_s * 1e3:.0f} ms",
            f"{each.bring_p99_s * 1e3:.0f} ms",
            f"{each.host_cores:.2f}",
            f"{each.lender_cores:.2f}",
        )
    stdout.print(table)
    measured = [asdict(each) for each in results]
    document = {"machine": machine.describe(), "traffic": asdict(traffic), "costs": asdict(costs)}
    write_json({**document, "hosts": measured}, json)
