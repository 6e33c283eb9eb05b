"""The daemon's messages: the one place where they are defined.

A message is a ZMQ multipart: ``[VERSION] [msgpack] [page bytes …]``; on the arena's own socket it is the
second of these, behind its length (``framing.py``). The version is one byte; a peer of
another version gets :class:`Refused` and is disconnected. The second frame is one of the structs below, as a
msgpack array with its tag first. Frames after it are page payloads, for the two messages of clients on other
hosts that have any (:class:`Write`, :class:`Fetched`).

Requests have an ``id`` of the client's choosing, which the answer repeats; answers may come in any order.
``wait_s`` is how long the sender will wait: the answer says what there was by then. One-way messages have no
id and no answer.

Nothing here is trusted by the daemon: sizes are bounded below, and an unknown, malformed or oversized message
is answered with :class:`Refused`, or by disconnecting when not even its id can be read.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

VERSION = b"\x03"

MAX_MESSAGE_BYTES = 64 << 20  # of one message with its payload frames: a prompt of 1M tokens needs 5 MB
MAX_CHUNKS = 1 << 17  # in one prompt
MAX_GROUPS = 1024  # layer groups of a model, on all of its workers
MAX_IDENTITY_BYTES = 4096
MAX_LIST_BYTES = 1 << 20  # of identities in one answer
MAX_FETCH_BYTES = 16 << 20  # asked for in one Fetch, or sent in one Write; more of them may be under way

MOST_WAIT_S = 600.0  # of any request
MOST_EXPECT_S = 10.0  # that a lookup waits for pages that somebody has promised

# What a field may hold at most: a message that holds more is malformed. msgspec compares the number of
# entries with these before it makes any. Requests of a real client stay far below.
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]
Payload: TypeAlias = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]
IdentityFields: TypeAlias = Annotated[dict[Text, Text], Meta(max_length=64)]
Numbers: TypeAlias = Annotated[list[int], Meta(max_length=MAX_CHUNKS)]

PING_S = 1.0  # a client without an arena socket says Ping at least this often …
SILENCE_S = 5.0  # … and is taken for dead, as is a daemon that does not answer it, after this

ARENA_MAGIC = b"tierkv\x00" + VERSION
ARENA_HEADER = struct.Struct("<8sQ16s")
"""What the unix socket ``PATH.arena`` (a stream) sends, once, to whoever connects: ``ARENA_MAGIC``, the
arena's size in bytes and the token for :class:`Hello`, with the arena's file descriptor (SCM_RIGHTS) on the
first byte. Messages follow, both ways; either side's end of file is its death."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """What all messages have in common: nothing but their encoding."""


# -- the session ---------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of a connection. ``token`` is what the arena's socket gave (empty: another host)."""

    id: int
    token: Payload = b""
    client: Text = ""  # for people: what it is and its process id


class Welcome(Message):
    id: int
    connection: int
    server: Text  # version, for people
    lease_s: float  # how long a lease lasts, from the daemon's answer on
    reserve_bytes: int  # how much a client may hold in reservations at once
    cluster: bool = False  # whether pages of other hosts can be brought


class Register(Message):
    """Name an identity (its fields; the daemon adds the tenant) and the size of its pages."""

    id: int
    identity: IdentityFields
    page_bytes: int
    chunk_tokens: int
    model_name: Text = ""  # what people call the model: not part of the identity


class Registered(Message):
    id: int
    identity: int  # how later messages refer to it


class Bye(Message):
    """One-way: a client without an arena socket ends its session. (Others hang up.)"""


class Ping(Message):
    """A sign of life of a client that has no arena socket; others need not send it."""

    id: int


class Pong(Message):
    id: int


class Refused(Message):
    """The request could not be done as asked. ``kind`` is for programs: ``version``, ``session`` (say Hello
    again), ``identity`` (register again), ``path`` (send the whole prompt), ``denied``, ``usage``,
    ``busy``, ``internal``."""

    id: int
    kind: Text
    message: Text


# -- prompts: what Lookup, Reserve, Pin and Unpin begin with -------------------------------------------


class PromptPart(Message):
    """A prompt, or its end. ``path`` names a prefix that an earlier :class:`Found` remembered, and ``known``
    how many of its chunks this prompt begins with; ``keys`` (16 bytes each) and ``tokens`` (uint32,
    little-endian) are those after it, the tokens to the prompt's end. ``named``: whole chunks that follow
    nothing, each to be found by its own key; then ``known`` is how many pages come before them, for the order
    in which they leave."""

    identity: int
    keys: Payload
    tokens: Payload
    path: int = 0  # 0: none
    known: int = 0
    named: bool = False


# -- reading -------------------------------------------------------------------------------------------


class Find(Message):
    """The longest held prefix, leased until :class:`Release`, the lease's end, or the client's. ``released``
    are leases given back on this occasion; ``declined`` is what earlier lookups found and the client did not
    load: tokens by tier and reason. ``expect``: so many leading tokens have been promised by whoever computes
    them, and the answer waits until they are held, ``expect_s`` seconds at most; ``wait_s`` counts from then
    on. ``gain``, of named chunks: so many tokens of a prompt need not be computed if those that are not held
    here come from other hosts. Where that is enough, the shared store is asked for them; 0: it is not."""

    id: int
    prompt: PromptPart
    max_tokens: int
    wait_s: float
    released: Numbers = []
    declined: Annotated[dict[Text, int], Meta(max_length=256)] = {}
    expect: int = 0
    expect_s: float = 0.0
    gain: int = 0


class Unexpect(Message):
    """One-way: nobody waits any more for what the :class:`Find` of this id expects. It is answered at
    once."""

    lookup: int


class Found(Message):
    """``tokens`` lie in ``tiers``: (``host`` or ``disk``, pages) run by run, in prefix order. Of the last
    page ``tail_tokens`` tokens match. ``lease`` is 0 when nothing was found. ``path`` may be referred to by
    later messages of this session, with up to ``known`` chunks. Of named chunks, ``positions`` (uint32) are
    those that are held, and the lease's pages in their order. ``rates`` says what bytes of a tier cost now:
    bytes a second, the latency and the queue in front of it, both in seconds; see
    :mod:`tierstore.planner`. Of named chunks, those at ``remote_positions`` (uint32), which are not held, can
    perhaps be brought from other hosts."""

    id: int
    tokens: int
    tail_tokens: int
    lease: int
    tiers: Annotated[list[tuple[Text, int]], Meta(max_length=MAX_CHUNKS)]
    path: int
    known: int
    positions: Payload = b""
    rates: Annotated[dict[Text, tuple[float, float, float]], Meta(max_length=256)] = {}
    remote_positions: Payload = b""


class NamedPart(msgspec.Struct, array_like=True):
    """A layer group whose pages are found by name: what a hit needs of it is the rule's of ``past``
    (:class:`tierstore.groups.Past`) and ``past_tokens``. The client has the pages that end at the tokens
    ``here`` (uint32) itself."""

    identity: int
    past: Text
    past_tokens: int
    here: Payload = b""


class FindHit(Message):
    """The longest hit of the first ``num_tokens`` tokens that all layer groups of a model support. ``chains``
    is the prompt as each group keeps it that needs every token; the client has the first ``here[i]`` tokens
    of ``chains[i]`` itself. A later chain has the first one's keys, or tokens, where it has none of its own.
    ``named`` are the other groups. ``names`` (32 bytes each) are those of the
    pages of all whole chunks, ``root`` is what the first one was chained behind, and ``tail`` are the tokens
    of the chunk that the ``num_tokens`` end in. ``counted`` is false for a second look on behalf of one
    request: the daemon's counters leave it out. The other fields are those of :class:`Find`."""

    id: int
    chains: Annotated[list[PromptPart], Meta(max_length=MAX_GROUPS)]
    here: Annotated[list[int], Meta(max_length=MAX_GROUPS)]
    named: Annotated[list[NamedPart], Meta(max_length=MAX_GROUPS)]
    names: Payload
    root: Payload
    tail: Payload
    num_tokens: int
    wait_s: float
    released: Numbers = []
    declined: Annotated[dict[Text, int], Meta(max_length=256)] = {}
    counted: bool = True


class GroupFound(msgspec.Struct, array_like=True):
    """What a hit needs of one layer group and the client does not have. The pages of ``lease`` lie in
    ``tiers``, as in :class:`Found`: the first ``tokens`` tokens of a chain, or the pages that the group's
    rule names, in prompt order. ``path`` and ``known`` are those of :class:`Found`. Other hosts seem to have
    the pages that end at the tokens ``remote_ends`` (uint32)."""

    lease: int
    tokens: int
    tiers: Annotated[list[tuple[Text, int]], Meta(max_length=MAX_CHUNKS)]
    path: int = 0
    known: int = 0
    remote_ends: Payload = b""


class HitFound(Message):
    """The hit has ``tokens`` tokens; the groups that need every token reach to ``branch``. With what other
    hosts seem to have it would be ``remote_tokens`` longer. ``rates`` is as in :class:`Found`."""

    id: int
    tokens: int
    branch: int
    chains: Annotated[list[GroupFound], Meta(max_length=MAX_GROUPS)]
    named: Annotated[list[GroupFound], Meta(max_length=MAX_GROUPS)]
    remote_tokens: int = 0
    rates: Annotated[dict[Text, tuple[float, float, float]], Meta(max_length=256)] = {}


class FetchRemote(Message):
    """Have ``count`` whole chunks of a prompt from ``first`` on come from other hosts into the arena. (Named
    ones, too; a daemon that shares none of these answers 0.)"""

    id: int
    prompt: PromptPart
    first: int
    count: int
    wait_s: float


class FetchedRemote(Message):
    id: int
    chunks: int  # that have come, one behind the other; look them up


class Prefetch(Message):
    """Bring the pages of a lease from ``first`` on into the arena, in prefix order."""

    id: int
    lease: int
    wait_s: float
    first: int = 0


class Prefetched(Message):
    id: int
    pages: int  # those from ``first`` on that are in the arena now, one behind the other


class Locate(Message):
    """Where in the arena pages ``first … first + count`` of a lease are; brings them there first."""

    id: int
    lease: int
    first: int
    count: int
    wait_s: float


class Offsets(Message):
    """``offsets`` (uint64, little-endian) of the leading pages that are there: fewer than asked for when the
    wait was over, a page was damaged or the arena full. They stay until the lease ends. ``checksums``
    (likewise) are the XXH3-64 of what was saved, 0 where it is not known."""

    id: int
    offsets: Payload
    checksums: Payload = b""


class Fetch(Message):
    """Like :class:`Locate`, for clients on other hosts: the pages themselves. At most ``MAX_FETCH_BYTES``."""

    id: int
    lease: int
    first: int
    count: int
    wait_s: float


class Fetched(Message):
    """Followed by one frame for each of the leading ``pages`` that are there."""

    id: int
    pages: int
    checksums: Payload  # XXH3-64 of each (uint64, little-endian)


class ReportDamage(Message):
    """One-way: what the arena has of a page of a lease is not what its checksum is of."""

    lease: int
    page: int


class Release(Message):
    """One-way: these leases are not needed any more."""

    leases: Numbers


# -- writing -------------------------------------------------------------------------------------------


class HintPart(Message):
    """What the client knows of the future of pages; see :class:`tierstore.types.Hint`."""

    ttl_s: float | None = None
    reuse: Text | None = None
    priority: int = 0
    elsewhere: bool = False


class Reserve(Message):
    """Room for pages ``first … first + count`` of a prompt (its partial tail included). ``count`` may be 0,
    for the sake of ``hint`` and ``session``, a name within the client's tenant (empty: none). Of named pages
    they are about those that the prompt names then."""

    id: int
    prompt: PromptPart
    first: int
    count: int
    hint: HintPart | None = None
    session: Text = ""


class Reserved(Message):
    """What is to be written: ``positions`` (uint32, from ``first`` on counted as 0) and the ``offsets`` of
    their slots (uint64). Pages that are there already, and pages for which there is no room, are not among
    them. ``stored_tokens`` are those that will be stored when all of it is committed. Later messages may
    refer to ``path`` with up to ``known`` chunks: :class:`Reserve` at once, others when that is done."""

    id: int
    reservation: int  # 0: nothing to write
    positions: Payload
    offsets: Payload
    stored_tokens: int
    path: int = 0
    known: int = 0


class Write(Message):
    """The bytes of pages ``first … `` of a reservation (counted in its ``positions``), one frame each: for
    clients on other hosts."""

    id: int
    reservation: int
    first: int


class Written(Message):
    id: int


class Commit(Message):
    """Pages of a reservation are complete: ``done`` (uint32 positions) with the XXH3-64 of each
    (``checksums``, uint64). Those left out are given up. Ends the reservation."""

    id: int
    reservation: int
    done: Payload
    checksums: Payload


class Committed(Message):
    id: int
    pages: int


class Finish(Message):
    """A session, as it was named in :class:`Reserve`, is over: what only it has used leaves first."""

    id: int
    session: Text


class Finished(Message):
    id: int
    pages: int  # that it was about


class Abort(Message):
    """One-way: give a reservation up."""

    reservation: int


# -- everything else -----------------------------------------------------------------------------------


class Pin(Message):
    """Keep the held whole chunks of a prompt's first ``max_tokens`` tokens (-1: all). ``undo``: take back the
    newest pin of exactly this prompt by the same tenant, whatever ``max_tokens`` it had."""

    id: int
    prompt: PromptPart
    undo: bool = False
    max_tokens: int = -1


class Pinned(Message):
    id: int
    tokens: int


class Unpin(Message):
    """Undo all pins of a tenant (empty: of clients without one; nil: of everybody). Not for tenants."""

    id: int
    tenant: Text | None


class Unpinned(Message):
    id: int
    pages: int


class Evict(Message):
    """Let up to ``pages`` pages leave ``tier`` (-1: all that may)."""

    id: int
    tier: Text
    pages: int


class Evicted(Message):
    id: int
    pages: int


class Flush(Message):
    """Wait until everything committed so far is on disk."""

    id: int
    wait_s: float


class Flushed(Message):
    id: int
    done: bool


class Identities(Message):
    """What there may be pages of: what sessions have registered or pages are held of, in the order of their
    digests, from behind ``after`` on; to a client with a tenant, its own."""

    id: int
    after: Payload = b""


class IdentitiesAnswer(Message):
    id: int
    identities: Annotated[list[IdentityFields], Meta(max_length=1 << 16)]  # the tenant as the client names it
    more: Payload = b""  # ask for what is ``after`` this; empty: that was all


class Stats(Message):
    id: int


class StatsAnswer(Message):
    id: int
    json: Payload  # as printed by ``tierstore stats --json``


Request: TypeAlias = (
    Hello
    | Bye
    | Register
    | Ping
    | Find
    | FindHit
    | FetchRemote
    | Prefetch
    | Locate
    | Fetch
    | ReportDamage
    | Unexpect
    | Release
    | Reserve
    | Write
    | Commit
    | Abort
    | Finish
    | Pin
    | Unpin
    | Evict
    | Flush
    | Identities
    | Stats
)
Answer: TypeAlias = (
    Welcome
    | Registered
    | Pong
    | Refused
    | Found
    | HitFound
    | FetchedRemote
    | Prefetched
    | Offsets
    | Fetched
    | Reserved
    | Written
    | Committed
    | Finished
    | Pinned
    | Unpinned
    | Evicted
    | Flushed
    | IdentitiesAnswer
    | StatsAnswer
)

OneWay: TypeAlias = Release | ReportDamage | Unexpect | Abort | Bye
"""Requests that have no id and no answer."""

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """The second frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises :class:`msgspec.MsgspecError` for anything that is no request."""
    return _requests.decode(frame)


def decode_answer(frame: bytes | memoryview) -> Answer:
    """Raises :class:`msgspec.MsgspecError` for anything that is no answer."""
    return _answers.decode(frame)
