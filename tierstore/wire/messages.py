"""The definition of the daemon's messages.

A message is a ZMQ multipart: ``[VERSION] [msgpack] [page bytes …]``. On the arena's own socket it is only the
second part, after its length (``framing.py``). The version is one byte. A peer of another version gets
:class:`Refused` and is disconnected. The second frame is one of the structs below, as a msgpack array that
begins with its tag. The frames after it are pages, in the two messages of clients on other hosts that have
any (:class:`Write`, :class:`Fetched`).

The client chooses the ``id`` of a request, and the answer repeats it. Answers may come in any order.
``wait_s`` is how long the sender will wait: the answer has the pages that were available by then. One-way
messages have no id and no answer.

The daemon trusts nothing in a message. Sizes have the limits below. An unknown, malformed or oversized
message is answered with :class:`Refused`, or the peer is disconnected if the id cannot be read.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from tierstore.explanation import Miss, MissedRequest
from tierstore.types import ForgetReceipt

VERSION = b"\x03"

MAX_MESSAGE_BYTES = 64 << 20  # one message with its payload frames: a prompt of 1M tokens needs 5 MB
MAX_CHUNKS = 1 << 17  # in one prompt
MAX_GROUPS = 1024  # layer groups of a model, on all of its workers
MAX_IDENTITY_BYTES = 4096
MAX_LIST_BYTES = 1 << 20  # identities in one answer
MAX_FETCH_BYTES = 16 << 20  # in one Fetch or Write; several may be under way

MOST_WAIT_S = 600.0  # for any request
MOST_EXPECT_S = 10.0  # for lookups that wait for promised pages

# Limits of fields: a message that exceeds them is malformed. msgspec checks the number of entries before it
# allocates them. Requests of real clients stay far below.
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]
Payload: TypeAlias = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]
IdentityFields: TypeAlias = Annotated[dict[Text, Text], Meta(max_length=64)]
Numbers: TypeAlias = Annotated[list[int], Meta(max_length=MAX_CHUNKS)]

PING_S = 1.0  # a client without an arena socket sends Ping at least this often …
SILENCE_S = 5.0  # … and counts as dead after this silence, as does a daemon that does not answer

ARENA_MAGIC = b"tierkv\x00" + VERSION
ARENA_HEADER = struct.Struct("<8sQ16s")
"""The header that the unix socket ``PATH.arena`` (a stream) sends once to each new connection:
``ARENA_MAGIC``, the arena's size in bytes and the token for :class:`Hello`. The arena's file descriptor
(SCM_RIGHTS) comes with the first byte. Messages follow in both directions. An end of file means that the
other side has died."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base of all messages, with their encoding."""


# -- the connection ------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of a connection. ``token`` comes from the arena's socket (empty: another host).
    ``client`` has at most 200 characters."""

    id: int
    token: Payload = b""
    client: Text = ""  # for people: the client's kind and process id


class Welcome(Message):
    id: int
    connection: int
    server: Text  # the daemon's version, for people
    lease_s: float  # the length of a lease, from the daemon's answer on
    reserve_bytes: int  # limit of one client's reservations
    cluster: bool = False  # whether pages can be fetched from other hosts
    forgets: int = 0  # engines have been told of all forgets up to this number
    max_age_s: float = 0.0  # how long pages may be kept; 0: no limit
    forget_log: Payload = b""  # which list of forgets the numbers are of: a restart may begin a new one


class Register(Message):
    """Register an identity (its fields; the daemon adds the tenant) and the size of its pages: 1 byte to
    1 GiB for 1 to 65,536 tokens. A connection has at most 1,024 identities."""

    id: int
    identity: IdentityFields
    page_bytes: int
    chunk_tokens: int
    model_name: Text = ""  # the model's name for people; not part of the identity


class Registered(Message):
    id: int
    identity: int  # the number for later messages
    forgotten: int = 0  # number of the last forget that covers it


class Bye(Message):
    """One-way: a client without an arena socket ends its connection. (Others close their socket.)"""


class Ping(Message):
    """A sign of life of a client without an arena socket. Other clients need not send it."""

    id: int


class Pong(Message):
    id: int


class Refused(Message):
    """The daemon cannot do what was requested. ``kind`` is for programs: ``version``, ``connection`` (say
    Hello again), ``identity`` (register again), ``path`` (send the whole prompt), ``denied``, ``usage``,
    ``busy``, ``internal``."""

    id: int
    kind: Text
    message: Text


# -- prompts, in Find, FindHit, Reserve and Pin --------------------------------------------------------


class PromptPart(Message):
    """A prompt, or its end. ``path`` names a prefix that an earlier :class:`Found` remembered, and ``known``
    is the number of its chunks that this prompt begins with. ``keys`` (16 bytes each) and ``tokens`` (uint32,
    little-endian) are those of the following chunks; the tokens go to the prompt's end. ``named``: the chunks
    are whole named pages, each found by its own key. Then ``known`` is the number of pages before them, which
    decides their eviction order."""

    identity: int
    keys: Payload
    tokens: Payload
    path: int = 0  # 0: none
    known: int = 0
    named: bool = False


# -- reading -------------------------------------------------------------------------------------------


class Find(Message):
    """Find the longest held prefix. It is leased until :class:`Release`, the lease's end, or the client's
    end. ``released`` are leases that are given back with this message. ``declined`` are tokens that earlier
    lookups found and the client did not load, by ``host slower``, ``host late``, ``disk slower`` or ``disk
    late``. With ``max_tokens`` 0 the request only waits for ``expect``.

    ``expect``: this many leading tokens have been promised by the client that computes them. The answer waits
    until they are held, at most ``expect_s`` seconds, and ``wait_s`` counts from then on. ``gain`` is for
    named chunks: the number of tokens that a prompt need not compute if the missing chunks come from other
    hosts. If that is enough, the shared store is asked for them (0: never). ``counted`` is false for a second
    lookup for the same request, which the daemon's counters leave out.
    """

    id: int
    prompt: PromptPart
    max_tokens: int
    wait_s: float
    released: Numbers = []
    declined: Annotated[dict[Text, int], Meta(max_length=256)] = {}
    expect: int = 0
    expect_s: float = 0.0
    gain: int = 0
    counted: bool = True


class Unexpect(Message):
    """One-way: the client does not need the promised pages of the :class:`Find` with this id any more. The
    daemon answers that request at once."""

    lookup: int


class Found(Message):
    """The answer to :class:`Find`. ``tokens`` lie in ``tiers``: pairs of (``host`` or ``disk``, pages), run
    by run, in prefix order. ``tail_tokens`` tokens of the last page match. ``lease`` is 0 if nothing was
    found. Later messages of this connection may refer to ``path``, with up to ``known`` chunks. For named
    chunks, ``positions`` (uint32) are the held ones, in the order of the lease's pages. ``rates`` has the
    present costs of each tier: bytes per second, and the latency and the queue in front of it, both in
    seconds; see :mod:`tierstore.planner`. The named chunks at ``remote_positions`` (uint32) are not held but
    can perhaps be fetched from other hosts."""

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
    """A layer group with named pages. ``past`` (``window``, ``chunk`` or ``state``; see
    :class:`tierstore.groups.Past`) and ``past_tokens`` are the rule for the pages that a hit needs. The
    client itself has the pages that end at the tokens ``here`` (uint32). For ``cross``, ``inputs`` has each
    input's first token and the end of its rows (uint32), and ``names`` (32 bytes each) are those of all pages
    of the inputs. A single group without chains may
    also have ``input`` (all rows of an input, or no hit), or, with ``explain``, ``all`` (the client has named
    the pages)."""

    identity: int
    past: Text
    past_tokens: int
    here: Payload = b""
    inputs: Payload = b""
    names: Payload = b""


class FindHit(Message):
    """Find the longest hit of the first ``num_tokens`` tokens that all layer groups of a model support.
    ``chains`` is the prompt in each group that needs every token. The client itself has the first ``here[i]``
    tokens of ``chains[i]``. A later chain without keys or tokens has those of the first one.

    ``named`` are the other groups. ``names`` (32 bytes each) are the names of the pages of all whole chunks,
    ``root`` is the parent of the first chunk, and ``tail`` are the tokens of the chunk in which
    ``num_tokens`` ends. ``explain``: the answer says why the tokens behind the hit are missed. For the other
    fields see :class:`Find`.
    """

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
    explain: bool = False


class GroupFound(msgspec.Struct, array_like=True):
    """The pages of one layer group that a hit needs and the client does not have. ``lease`` holds
    them, in prompt order: those of the first ``tokens`` tokens of a chain, or those that the group's rule
    names. ``tiers``, ``path`` and ``known`` are as in :class:`Found`. Other hosts probably have the pages
    that end at the tokens ``remote_ends`` (uint32)."""

    lease: int
    tokens: int
    tiers: Annotated[list[tuple[Text, int]], Meta(max_length=MAX_CHUNKS)]
    path: int = 0
    known: int = 0
    remote_ends: Payload = b""


class HitFound(Message):
    """The answer to :class:`FindHit`. The hit has ``tokens`` tokens. The groups that need every token reach
    to ``branch``. With pages that other hosts probably have, the hit would be ``remote_tokens`` longer.
    ``rates`` is as in :class:`Found`. ``misses`` (:class:`~tierstore.explanation.Miss`) are the spans of
    missed tokens, if the request asked for them: the number of a layer group is its place in the request,
    those in ``chains`` first."""

    id: int
    tokens: int
    branch: int
    chains: Annotated[list[GroupFound], Meta(max_length=MAX_GROUPS)]
    named: Annotated[list[GroupFound], Meta(max_length=MAX_GROUPS)]
    remote_tokens: int = 0
    rates: Annotated[dict[Text, tuple[float, float, float]], Meta(max_length=256)] = {}
    misses: Annotated[list[Miss], Meta(max_length=MAX_CHUNKS)] = []


class FetchRemote(Message):
    """Fetch ``count`` whole chunks of a prompt from ``first`` on from other hosts into the arena. (Named
    chunks, too; a daemon that shares none of them answers 0.)"""

    id: int
    prompt: PromptPart
    first: int
    count: int
    wait_s: float


class FetchedRemote(Message):
    id: int
    chunks: int  # the number of arrived chunks, without a gap; look them up


class Prefetch(Message):
    """Load the pages of a lease from ``first`` on into the arena, in prefix order."""

    id: int
    lease: int
    wait_s: float
    first: int = 0


class Prefetched(Message):
    id: int
    pages: int  # the number of pages from ``first`` on in the arena, without a gap


class Locate(Message):
    """Load pages ``first … first + count`` of a lease into the arena and return their places."""

    id: int
    lease: int
    first: int
    count: int
    wait_s: float


class Offsets(Message):
    """The answer to :class:`Locate`: ``offsets`` (uint64, little-endian) of the leading pages in the arena.
    There are fewer than requested if the wait ended, a page was damaged or the arena was full. The pages stay
    until the lease ends. ``checksums`` (likewise) are the XXH3-64 of the saved pages, 0 if unknown."""

    id: int
    offsets: Payload
    checksums: Payload = b""


class Fetch(Message):
    """Like :class:`Locate`, but return the pages themselves, for clients on other hosts. At most
    ``MAX_FETCH_BYTES``, or one page."""

    id: int
    lease: int
    first: int
    count: int
    wait_s: float


class Fetched(Message):
    """The answer to :class:`Fetch`, followed by one frame for each of the leading ``pages``."""

    id: int
    pages: int
    checksums: Payload  # XXH3-64 of each (uint64, little-endian)


class ReportDamage(Message):
    """One-way: a page of a lease in the arena does not match its checksum. The daemon checks this, and no
    longer serves a damaged copy."""

    lease: int
    page: int


class Release(Message):
    """One-way: these leases are not needed any more. Unknown ones are ignored."""

    leases: Numbers


# -- writing -------------------------------------------------------------------------------------------


class HintPart(Message):
    """The client's knowledge about the future of pages; see :class:`tierstore.types.Hint`."""

    ttl_s: float | None = None
    reuse: Text | None = None
    priority: int = 0
    elsewhere: bool = False


class Reserve(Message):
    """Reserve room for pages ``first … first + count`` of a prompt, including its partial tail. The answer
    waits while reservations of other clients hold one of these pages. ``session`` is a name within the
    client's tenant, of at most 256 characters (empty: none).

    With ``count`` 0 only ``hint`` and ``session`` are sent. With named pages, they then apply to the pages
    that the prompt names. Named pages with the hint ``done`` that no other session saved leave every tier as
    soon as nothing holds them."""

    id: int
    prompt: PromptPart
    first: int
    count: int
    hint: HintPart | None = None
    session: Text = ""


class Reserved(Message):
    """The answer to :class:`Reserve`: ``positions`` to write (uint32, counted from ``first``) and the
    ``offsets`` of their slots (uint64). Pages that are stored already, and pages without room, are not
    included. ``stored_tokens`` are stored after everything is committed. Later messages may refer to ``path``
    with up to ``known`` chunks: :class:`Reserve` at once, others after the commit."""

    id: int
    reservation: int  # 0: nothing to write
    positions: Payload
    offsets: Payload
    stored_tokens: int
    path: int = 0
    known: int = 0


class Write(Message):
    """The pages of a reservation from ``first`` on (counted in its ``positions``), one frame each, for
    clients on other hosts."""

    id: int
    reservation: int
    first: int


class Written(Message):
    id: int


class Commit(Message):
    """Declare pages of a reservation complete: ``done`` (uint32 positions), with the XXH3-64 of each
    (``checksums``, uint64). The other pages are aborted. Ends the reservation."""

    id: int
    reservation: int
    done: Payload
    checksums: Payload


class Committed(Message):
    id: int
    pages: int


class Finish(Message):
    """End a session that was named in :class:`Reserve`. Pages that only this session has used are evicted
    first."""

    id: int
    session: Text


class Finished(Message):
    id: int
    pages: int  # the number of these pages


class Abort(Message):
    """One-way: abort a reservation."""

    reservation: int


# -- everything else -----------------------------------------------------------------------------------


class Pin(Message):
    """Pin the held whole chunks of a prompt's first ``max_tokens`` tokens (-1: all). ``undo``: undo the
    newest pin of exactly this prompt by the same tenant, for any ``max_tokens``."""

    id: int
    prompt: PromptPart
    undo: bool = False
    max_tokens: int = -1


class Pinned(Message):
    id: int
    tokens: int


class Unpin(Message):
    """Undo all pins of a tenant (empty: of clients without a tenant; nil: all pins). Refused for tenants."""

    id: int
    tenant: Text | None


class Unpinned(Message):
    id: int
    pages: int


class Evict(Message):
    """Evict up to ``pages`` pages from ``tier`` (-1: all that may leave)."""

    id: int
    tier: Text
    pages: int


class Evicted(Message):
    id: int
    pages: int


class Forget(Message):
    """Forget all pages of a tenant, of a model (its name), or of both; or a session of a tenant. Nil: not
    given. A client with a tenant forgets only its own pages; ``tenant`` is then one that it distinguishes."""

    id: int
    tenant: Text | None = None
    model: Text | None = None
    session: Text | None = None


class Forgotten(Message):
    """The answer to :class:`Forget`. From now on, no lookup finds the pages. In an encrypted store, the keys
    of the tenant or model are gone."""

    id: int
    receipt: ForgetReceipt


class PagesForgotten(Message):
    """Sent without a request (``id`` is 0) after a forget. The client must use no page of ``identities`` any
    more. It must also not use the pages with these keys of an identity, and pages behind them. The client has
    then been told of all forgets up to ``number``."""

    id: int
    number: int
    identities: Numbers
    pages: Annotated[list[tuple[int, Payload]], Meta(max_length=MAX_GROUPS)] = []


class Flush(Message):
    """Wait until everything committed so far is on disk."""

    id: int
    wait_s: float


class Flushed(Message):
    id: int
    done: bool


class Identities(Message):
    """List the identities that clients have registered or that have stored pages, ordered by digest, after
    ``after``. A client with a tenant gets only its own."""

    id: int
    after: Payload = b""


class IdentitiesAnswer(Message):
    id: int
    identities: Annotated[list[IdentityFields], Meta(max_length=1 << 16)]  # the tenant as the client names it
    more: Payload = b""  # the value of ``after`` for the next request; empty at the end


class MissedRequests(Message):
    """List the last ``most`` requests with missed tokens, of at most 256. A client with a tenant gets only
    those of its tenant."""

    id: int
    most: int


class MissedRequestsAnswer(Message):
    id: int
    requests: Annotated[list[MissedRequest], Meta(max_length=1 << 16)]  # the newest first


class Stats(Message):
    id: int


class StatsAnswer(Message):
    id: int
    json: Payload  # the document of ``tierstore stats --json``


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
    | Forget
    | Flush
    | Identities
    | MissedRequests
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
    | Forgotten
    | PagesForgotten
    | Flushed
    | IdentitiesAnswer
    | MissedRequestsAnswer
    | StatsAnswer
)

OneWay: TypeAlias = Release | ReportDamage | Unexpect | Abort | Bye
"""Requests that have no id and no answer."""

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """Return the second frame of a message."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """Decode a request. Raise :class:`msgspec.MsgspecError` for anything else."""
    return _requests.decode(frame)


def decode_answer(frame: bytes | memoryview) -> Answer:
    """Decode an answer. Raise :class:`msgspec.MsgspecError` for anything else."""
    return _answers.decode(frame)
