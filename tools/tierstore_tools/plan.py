"""``tierstore-bench plan``: two simulations of queues, from measured costs.

**cluster** finds where a store that many hosts share saturates. Requests arrive at each host at random. A
share of the requests needs pages that the host does not hold, and asks the master, which answers one call at
a time. A share of the requests that ask finds its pages at a lender, which sends them over its own link and
the host's link. Hosts publish reused pages over the same links. Every queue is first come, first served.
Links are full duplex and carry one transfer at a time in each direction. Switches and kernels under load are
not modelled.

**handover** finds the traffic from which separate prefill and decode engines pay. Requests arrive at random
and go to the engine with the fewest queued prompt tokens. An engine computes in steps like the bundled one:
one token for each sequence that decodes, and in the rest of the step a chunk of the oldest prompt. *Together*
means that every engine computes prompts and decodes. *Apart* means that some engines only compute prompts,
and that a sequence decodes at another engine, ``handover_s`` later. The simulation tries several splits and
keeps the best one.

An arrangement *serves* a rate when the 99th percentiles of the time to first token and of the time between
tokens are within their limits. The simulation assumes that all engines are equal, that memory is unlimited,
and that nothing is cached.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from tierstore.errors import UsageError
from tierstore.units import format_size
from tierstore_tools import machine, report


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie; 0 for an empty sequence."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


# -- cluster -------------------------------------------------------------------------------------------

_CLUSTER_REQUESTS = 20_000
_LOOKUP_BUDGET_S = 0.003  # a host that gets no answer within this time does not use the shared store
_WIRE_S = 0.0002  # round trip


@dataclass(frozen=True, slots=True)
class ClusterCosts:
    """Processor seconds: the master's for a call and for each name in it, and those of host and lender for a
    byte."""

    master_call_s: float
    master_name_s: float
    host_s_per_byte: float
    lender_s_per_byte: float


@dataclass(frozen=True, slots=True)
class ClusterTraffic:
    """The traffic of one host. ``asking`` is a share of its requests, ``found`` and ``published`` are shares
    of the requests that ask."""

    requests_per_s: float
    tokens: int
    chunk_tokens: int
    page_bytes: int
    asking: float
    found: float
    published: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Utilisation from 0 to 1, and latencies in seconds, for a number of hosts."""

    hosts: int
    master_busy: float
    late_lookups: float
    lookup_p99_s: float
    link_busy: float
    fetch_p50_s: float
    fetch_p99_s: float
    host_cores: float
    lender_cores: float


class _Links:
    """The links of all hosts. Each direction of a link has a queue."""

    def __init__(self, hosts: int, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._out_free = [0.0] * hosts
        self._in_free = [0.0] * hosts
        self.moved_bytes = 0.0

    def move(self, sender: int, receiver: int, now: float, nbytes: float) -> float:
        """Queue a transfer. Return the time at which its last byte arrives."""
        took_s = nbytes / self._bytes_per_s
        self.moved_bytes += nbytes
        self._out_free[sender] = max(self._out_free[sender], now) + took_s
        ends = max(self._out_free[sender], self._in_free[receiver] + took_s)
        self._in_free[receiver] = ends
        return ends


def simulate_cluster(
    hosts: int, traffic: ClusterTraffic, costs: ClusterCosts, *, seed: int = 1
) -> ClusterLoad:
    """Simulate 20,000 requests to ``hosts`` hosts. Every host lends memory."""
    draw = random.Random(seed)
    pages = traffic.tokens // traffic.chunk_tokens
    lookup_s = costs.master_call_s + pages * costs.master_name_s
    nbytes = pages * traffic.page_bytes
    arrivals = [(draw.expovariate(traffic.requests_per_s), host) for host in range(hosts)]
    heapq.heapify(arrivals)
    master_free = master_busy = 0.0
    links = _Links(hosts, traffic.link_bytes_per_s)
    lookups: list[float] = []
    fetches: list[float] = []
    now = 0.0
    for _ in range(_CLUSTER_REQUESTS):
        now, host = heapq.heappop(arrivals)
        heapq.heappush(arrivals, (now + draw.expovariate(traffic.requests_per_s), host))
        if draw.random() >= traffic.asking:
            continue
        master_free = max(master_free, now) + lookup_s
        master_busy += lookup_s
        lookups.append(master_free - now + _WIRE_S)
        if lookups[-1] <= _LOOKUP_BUDGET_S and draw.random() < traffic.found:
            fetches.append(links.move(draw.randrange(hosts), host, now, nbytes) - now)
        if draw.random() < traffic.published:
            links.move(host, draw.randrange(hosts), now, nbytes)
    bytes_per_s = links.moved_bytes / now / hosts
    return ClusterLoad(
        hosts,
        min(master_busy / now, 1.0),
        sum(each > _LOOKUP_BUDGET_S for each in lookups) / max(len(lookups), 1),
        percentile(lookups, 0.99),
        min(bytes_per_s / traffic.link_bytes_per_s, 1.0),
        percentile(fetches, 0.5),
        percentile(fetches, 0.99),
        bytes_per_s * costs.host_s_per_byte,
        bytes_per_s * costs.lender_s_per_byte,
    )


def run_cluster(
    hosts: Sequence[int], traffic: ClusterTraffic, costs: ClusterCosts, *, json: str | None
) -> None:
    """Simulate each number of hosts, print a table, write JSON."""
    report.require_targets(json)
    loads = [simulate_cluster(count, traffic, costs) for count in hosts]
    report.table(
        f"{traffic.requests_per_s:g} requests/s per host, {traffic.tokens:,} tokens "
        f"({traffic.tokens // traffic.chunk_tokens:,} pages of {format_size(traffic.page_bytes)}), "
        f"{traffic.asking:.0%} ask, {traffic.found:.0%} of these find pages, "
        f"links of {format_size(traffic.link_bytes_per_s)}/s",
        ("hosts", "master", "lookup p99", "late", "links", "fetch p50", "p99", "host cores", "lender cores"),
        [
            (
                f"{load.hosts:,}",
                report.percent(load.master_busy),
                report.seconds(load.lookup_p99_s),
                report.percent(load.late_lookups),
                report.percent(load.link_busy),
                report.seconds(load.fetch_p50_s),
                report.seconds(load.fetch_p99_s),
                f"{load.host_cores:.2f}",
                f"{load.lender_cores:.2f}",
            )
            for load in loads
        ],
        to_stderr=json == "-",
    )
    document = {"machine": machine.describe(), "traffic": asdict(traffic), "costs": asdict(costs)}
    report.write_json({**document, "hosts": [asdict(load) for load in loads]}, json)


# -- handover ------------------------------------------------------------------------------------------

_REQUESTS_PER_ENGINE = 400
_MOST_REQUESTS = 2_000  # in one simulation
_BISECTIONS = 8  # steps of the search for the highest rate
_SPLITS = 7


@dataclass(frozen=True, slots=True)
class HandoverCosts:
    """Seconds. A step takes ``step_s``, ``sequence_s`` for each sequence that decodes in it and ``token_s``
    for each of its at most ``prefill_chunk`` prompt tokens. ``handover_s`` passes between the end of a
    prefill and the first token at another engine."""

    step_s: float
    sequence_s: float
    token_s: float
    prefill_chunk: int
    handover_s: float


@dataclass(frozen=True, slots=True)
class HandoverRequests:
    """Prompts of ``tokens`` tokens with ``answer`` generated tokens, and the limits of p99 in seconds."""

    tokens: int
    answer: int
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class ServedRate:
    """Latencies at one rate of requests, in seconds."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    def within(self, requests: HandoverRequests) -> bool:
        """Return whether both p99 are within the limits."""
        return self.ttft_p99 <= requests.ttft_s and self.itl_p99 <= requests.itl_s


@dataclass(frozen=True, slots=True)
class HandoverPoint:
    """The best arrangements of ``engines`` engines. ``together`` and ``apart`` are the highest rates in
    requests per second that are served within the limits (0 if none is); ``prefill`` engines compute the
    prompts of the best split."""

    engines: int
    together: float
    apart: float
    prefill: int
    together_at_best: ServedRate
    apart_at_best: ServedRate


@dataclass(slots=True, eq=False)
class _Prompt:
    arrived_at: float
    left: int


@dataclass(slots=True, eq=False)
class _SimulatedEngine:
    """A simulated engine. Steps follow one another while there is work. A sequence that joins during a step
    is computed from the next step on. Steps that only generate tokens, until a sequence ends, are one event.
    An arrival ends this event early."""

    prompts: deque[_Prompt] = field(default_factory=deque)
    queued_tokens: int = 0  # in these prompts
    decoding: int = 0
    joining: list[float] = field(default_factory=list)  # time of each joining sequence's last token
    joined: list[float] = field(default_factory=list)  # the same for sequences in their first step
    ending: Counter[int] = field(default_factory=Counter)  # sequences by their last step
    step: int = 0
    computing: int = 0  # prompt tokens in this step
    begun_at: float = 0.0  # start of the current event
    steps: int = 1  # in the current event
    step_s: float = 0.0
    event: int = 0  # the number of the worker's valid event; older events in the queue are void
    busy: bool = False

    @property
    def load(self) -> int:
        """Outstanding work in tokens."""
        return self.queued_tokens + self.decoding + len(self.joining)


class _Simulation:
    """One run of the simulation, with a queue of events in order of time."""

    def __init__(self, prefill: int, decode: int, requests: HandoverRequests, costs: HandoverCosts) -> None:
        workers = [_SimulatedEngine() for _ in range(prefill + decode)]
        self._apart = bool(prefill)
        self._for_prompts, self._for_tokens = workers[: prefill or decode], workers[prefill:]
        self._requests = requests
        self._costs = costs
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._ttfts: list[float] = []
        self._gaps: list[tuple[float, int]] = []  # (a gap between tokens, number of gaps of that length)

    def run(self, rate_per_s: float, count: int, seed: int) -> ServedRate:
        draw, at = random.Random(seed), 0.0
        for _ in range(count):
            at += draw.expovariate(rate_per_s)
            self._at(at, partial(self._arrive, _Prompt(at, self._requests.tokens)))
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return ServedRate(
            percentile(self._ttfts, 0.5),
            percentile(self._ttfts, 0.99),
            _weighted_percentile(self._gaps, 0.5),
            _weighted_percentile(self._gaps, 0.99),
        )

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _arrive(self, prompt: _Prompt, now: float) -> None:
        worker = min(self._for_prompts, key=lambda each: each.load)
        worker.prompts.append(prompt)
        worker.queued_tokens += prompt.left
        self._wake(worker, now)

    def _first_token(self, prompt: _Prompt, worker: _SimulatedEngine | None, now: float) -> None:
        """Let the sequence decode at ``worker``, or (None) at the decode worker with the least load."""
        self._ttfts.append(now - prompt.arrived_at)
        if self._requests.answer > 1:
            worker = worker or min(self._for_tokens, key=lambda each: each.load)
            worker.joining.append(now)
            self._wake(worker, now)

    def _wake(self, worker: _SimulatedEngine, now: float) -> None:
        if not worker.busy:
            self._begin(worker, now)
        elif worker.steps > 1:
            begun = int((now - worker.begun_at) / worker.step_s) + 1
            worker.steps = min(begun, worker.steps)
            self._schedule(worker)

    def _schedule(self, worker: _SimulatedEngine) -> None:
        worker.event += 1
        ends_at = worker.begun_at + worker.steps * worker.step_s
        self._at(ends_at, partial(self._end, worker, worker.event))

    def _begin(self, worker: _SimulatedEngine, now: float) -> None:
        costs = self._costs
        worker.begun_at = now
        if worker.joining:
            worker.ending[worker.step + self._requests.answer - 1] += len(worker.joining)
            worker.decoding += len(worker.joining)
        worker.joined, worker.joining = worker.joining, []
        worker.computing = 0
        if worker.prompts:
            worker.computing = min(worker.prompts[0].left, max(costs.prefill_chunk - worker.decoding, 1))
        worker.busy = bool(worker.computing or worker.decoding)
        if worker.busy:
            decode_s = worker.decoding * costs.sequence_s
            worker.step_s = costs.step_s + decode_s + worker.computing * costs.token_s
            worker.steps = 1 if worker.computing else min(worker.ending) - worker.step
            self._schedule(worker)

    def _end(self, worker: _SimulatedEngine, event: int, now: float) -> None:
        if event != worker.event:
            return
        worker.step += worker.steps
        self._gaps.append((worker.step_s, worker.decoding * worker.steps - len(worker.joined)))
        first_at = worker.begun_at + worker.step_s
        self._gaps += [(first_at - last_at, 1) for last_at in worker.joined]
        worker.decoding -= worker.ending.pop(worker.step, 0)
        if worker.computing:
            prompt = worker.prompts[0]
            prompt.left -= worker.computing
            worker.queued_tokens -= worker.computing
            if not prompt.left:
                worker.prompts.popleft()
                if self._apart:
                    self._at(now + self._costs.handover_s, partial(self._first_token, prompt, None))
                else:
                    self._first_token(prompt, worker, now)
        self._begin(worker, now)


def simulate_handover(
    rate_per_s: float,
    prefill: int,
    decode: int,
    requests: HandoverRequests,
    costs: HandoverCosts,
    *,
    seed: int = 1,
) -> ServedRate:
    """Simulate ``prefill`` engines before ``decode`` engines. With 0 prefill engines, the decode engines also
    compute prompts."""
    count = min(_REQUESTS_PER_ENGINE * (prefill + decode), _MOST_REQUESTS)
    return _Simulation(prefill, decode, requests, costs).run(rate_per_s, count, seed)


def highest_rate(
    prefill: int, decode: int, requests: HandoverRequests, costs: HandoverCosts
) -> tuple[float, ServedRate]:
    """Return the highest rate within the limits, and its latencies. Return 0 if a single request already
    exceeds the limits."""
    alone_s = requests.tokens * costs.token_s + requests.answer * (costs.step_s + costs.sequence_s)
    low, high = 0.0, 1.5 * (prefill or decode) / (requests.tokens * costs.token_s)
    best = simulate_handover(0.01 / alone_s, prefill, decode, requests, costs)
    if not best.within(requests):
        return 0.0, best
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        served = simulate_handover(middle, prefill, decode, requests, costs)
        if served.within(requests):
            low, best = middle, served
        else:
            high = middle
    return low, best


def compare(engines: int, requests: HandoverRequests, costs: HandoverCosts) -> HandoverPoint:
    """Return the highest rate of ``engines`` engines together, and that of their best split."""
    together, served = highest_rate(0, engines, requests, costs)
    tried = min(engines - 1, _SPLITS)
    splits = sorted({round(1 + at * (engines - 2) / max(tried - 1, 1)) for at in range(tried)})
    found = [(*highest_rate(count, engines - count, requests, costs), count) for count in splits]
    apart, served_apart, prefill = max(found, key=lambda each: each[0])
    return HandoverPoint(engines, together, apart, prefill, served, served_apart)


def run_handover(
    engines: Sequence[int],
    answers: Sequence[int],
    requests: HandoverRequests,
    costs: HandoverCosts,
    *,
    json: str | None,
) -> None:
    """Simulate each answer length with each number of engines, print a table, write JSON."""
    report.require_targets(json)
    if min(engines) < 2:
        raise UsageError(f"--engines must be at least 2 (a prefill and a decode engine), got {min(engines)}")
    points: list[tuple[int, HandoverPoint]] = []
    with report.phases() as phases:
        for answer in answers:
            with phases.phase(f"answers of {answer} tokens") as phase:
                for number, count in enumerate(engines):
                    points.append((answer, compare(count, replace(requests, answer=answer), costs)))
                    phase.update((number + 1) / len(engines))
    report.table(
        f"prompts of {requests.tokens:,} tokens; requests/s with p99 of TTFT ≤ "
        f"{report.seconds(requests.ttft_s)} and of ITL ≤ {report.seconds(requests.itl_s)}",
        ("answer", "engines", "together", "apart", "prefill + decode", "apart ÷ together"),
        [
            (
                str(answer),
                str(point.engines),
                f"{point.together:.2f}",
                f"{point.apart:.2f}",
                f"{point.prefill} + {point.engines - point.prefill}",
                f"{point.apart / point.together:.2f}" if point.together else "–",
            )
            for answer, point in points
        ],
        to_stderr=json == "-",
    )
    document = {
        "machine": machine.describe(),
        "requests": {**asdict(requests), "answer": list(answers)},
        "costs": asdict(costs),
        "points": [{"answer": answer, **asdict(point)} for answer, point in points],
    }
    report.write_json(document, json)


def _weighted_percentile(values: Sequence[tuple[float, int]], share: float) -> float:
    """Return a percentile of values, each given with the number of its occurrences; 0 for an empty
    sequence."""
    left = int(sum(count for _, count in values) * share)
    for value, count in sorted(values):
        left -= count
        if left < 0:
            return value
    return 0.0
