"""The definition of the daemon's messages.

A message is a ZMQ multipart: ``[VERSION] [msgpack] [page bytes …]``. On the arena's own socket a message is
only the msgpack part, after its length (``framing.py``). The version is one byte. A peer of another version
gets :class:`Refused`. The msgpack part is one of the structs below, as an array that begins with the struct's
name. Page frames follow only :class:`Write` and :class:`Fetched`, which clients on other hosts use.

The client chooses the ``id`` of a request, and the answer repeats it. Answers may arrive in any order.
``wait_s`` is how many seconds the sender will wait. The daemon answers within this time, with the pages that
are available. One-way messages have no id and no answer.

The daemon trusts nothing in a message. A message above ``MAX_MESSAGE_BYTES`` ends the connection. An unknown
or malformed message is answered with :class:`Refused` if its id can be read, and is ignored otherwise.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from tierstore.explanation import Miss, MissedRequest
from tierstore.types import ForgetReceipt

VERSION = b"\x03"

MAX_MESSAGE_BYTES = 64 << 20  # of one message; a prompt of 1M tokens needs 5 MB
MAX_CHUNKS = 1 << 17  # in one prompt
MAX_GROUPS = 1024  # layer groups of a model, on all of its workers
MAX_IDENTITY_BYTES = 4096
MAX_LIST_BYTES = 1 << 20  # identities in one answer
MAX_FETCH_BYTES = 16 << 20  # in one Fetch or Write

MOST_WAIT_S = 600.0  # for any request
MOST_EXPECT_S = 10.0  # for lookups that wait for promised pages

# A message that exceeds these limits of its fields is malformed. msgspec checks the number of entries before
# it allocates memory for them. Requests of real clients are far smaller.
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]
Payload: TypeAlias = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]
IdentityFields: TypeAlias = Annotated[dict[Text, Text], Meta(max_length=64)]
Numbers: TypeAlias = Annotated[list[int], Meta(max_length=MAX_CHUNKS)]

PING_S = 1.0  # a client without an arena socket sends Ping at least this often
SILENCE_S = 5.0  # over TCP, a client or a daemon that has sent nothing for this long counts as dead

ARENA_MAGIC = b"tierkv\x00" + VERSION
ARENA_HEADER = struct.Struct("<8sQ16s")
"""The header that the unix socket ``PATH.arena`` (a stream) sends once to each new connection:
``ARENA_MAGIC``, the arena's size in bytes and the token for :class:`Hello`. The arena's file descriptor is
sent with the first byte (SCM_RIGHTS). Messages follow in both directions. An end of file means that the peer
has died."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base class of all messages, which defines their encoding."""


# -- the connection ------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of a connection. ``token`` is the one in the header of the arena's socket (empty for
    a client on another host). ``client`` has at most 200 characters."""

    id: int
    token: Payload = b""
    client: Text = ""  # the client's kind and process id, for logs and statistics


class Welcome(Message):
    id: int
    connection: int
    server: Text  # the daemon's version, for logs
    lease_s: float  # the length of a lease, from the daemon's answer on
    reserve_bytes: int  # limit of one client's reservations
    cluster: bool = False  # whether pages can be fetched from other hosts
    forgets: int = 0  # number of the last forget that clients were informed of
    max_age_s: float = 0.0  # how long pages may be kept; 0: no limit
    forget_log: Payload = b""  # identifies the list that numbers forgets; a restart may begin a new list


class Register(Message):
    """Register an identity, to which the daemon adds the tenant, and the size of its pages: 1 byte to 1 GiB
    for 1 to 65,536 tokens. A connection has at most 1,024 identities."""

    id: int
    identity: IdentityFields
    page_bytes: int
    chunk_tokens: int
    model_name: Text = ""  # the model's name for statistics and commands; not part of the identity


class Registered(Message):
    id: int
    identity: int  # the number that stands for the identity in later messages of this connection
    forgotten: int = 0  # number of the last forget that concerned this identity


class Bye(Message):
    """One-way: a client without an arena socket ends its connection. (A local client closes its socket.)"""


class Ping(Message):
    """A client without an arena socket sends this regularly, so that the daemon knows that it lives."""

    id: int


class Pong(Message):
    id: int


class Refused(Message):
    """The daemon has refused a request. ``kind`` is ``version``, ``connection`` (the client must send Hello
    again), ``identity`` (it must register again), ``path`` (it must send the whole prompt), ``denied``,
    ``usage``, ``busy`` or ``internal``."""

    id: int
    kind: Text
    message: Text


# -- prompts, in Find, FindHit, Reserve and Pin --------------------------------------------------------


class PromptPart(Message):
    """A prompt. ``path`` is a number that an earlier answer gave to a prefix, and the prompt begins with the
    first ``known`` chunks of this prefix. ``keys`` (16 bytes each) and ``tokens`` (uint32, little-endian) are
    those of the chunks after the known ones, up to the prompt's end. ``named``: the chunks are whole named
    pages, each found by its own key. For named chunks, ``known`` is the number of pages before them, which
    decides their eviction order."""

    identity: int
    keys: Payload
    tokens: Payload
    path: int = 0  # 0: none
    known: int = 0
    named: bool = False


# -- reading -------------------------------------------------------------------------------------------


class Find(Message):
    """Find the longest stored prefix of a prompt, and lease its pages until :class:`Release`, the lease's
    end, or the client's end. ``released`` are earlier leases that are released at the same time. ``declined``
    counts tokens that earlier lookups found and the client did not load, by tier and reason: ``host slower``,
    ``host late``, ``disk slower`` or ``disk late``. With ``max_tokens`` 0 the request only waits for
    ``expect``.

    ``expect`` is the number of leading tokens whose pages another client has promised to save. The daemon
    answers when these pages are saved, after at most ``expect_s`` seconds; ``wait_s`` counts from then on.
    ``gain`` is for named chunks: the number of tokens that need not be computed if other hosts have the
    missing chunks. If ``gain`` is large enough, the daemon searches them in the shared store (0: never).
    ``counted`` is false for a second lookup of the same request, which the daemon's counters must not count
    again.
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
    """One-way: the client no longer waits for the promised pages of the :class:`Find` with the id ``lookup``.
    The daemon answers that request at once."""

    lookup: int


class Found(Message):
    """The answer to :class:`Find`. ``tokens`` tokens were found. ``tiers`` says where their pages are, in
    prefix order: pairs of a tier (``host`` or ``disk``) and a number of consecutive pages. The first
    ``tail_tokens`` tokens of the last page match. ``lease`` is 0 if no page was found. Later messages of this
    connection may refer to ``path``, with up to ``known`` chunks. For named chunks, ``positions`` (uint32)
    are the found ones, in the order of the lease's pages. ``rates`` has for each tier the bytes per second,
    the latency and the time that queued transfers take, both in seconds; see :mod:`tierstore.planner`. The
    named chunks at ``remote_positions`` (uint32) were not found, but other hosts probably have them."""

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
    """A layer group with named pages. ``past`` (``window``, ``chunk``, ``state`` or ``cross``; see
    :class:`tierstore.groups.Past`) and ``past_tokens`` determine which pages a hit needs. The client itself
    has the pages that end at the tokens ``here`` (uint32). For ``cross``, ``inputs`` has each input's first
    token and the end of its rows (uint32), and ``names`` (32 bytes each) are the names of all pages of the
    inputs. If the request has a single group and no chains, ``past`` may also be ``input`` (a hit needs all
    rows of an input). With ``explain``, the only group may also be ``all`` (a hit needs all pages, which the
    client has named)."""

    identity: int
    past: Text
    past_tokens: int
    here: Payload = b""
    inputs: Payload = b""
    names: Payload = b""


class FindHit(Message):
    """Find the longest hit in the first ``num_tokens`` tokens of a prompt that all layer groups of a model
    support. ``chains`` describes the prompt once for each group that needs every token. The client itself has
    the first ``here[i]`` tokens of ``chains[i]``. If a later chain has no keys or tokens, they are those of
    ``chains[0]``.

    ``named`` are the groups with named pages. ``names`` (32 bytes each) are the names of the pages of all
    whole chunks, ``root`` is the parent of the first chunk, and ``tail`` are the tokens of the chunk in which
    ``num_tokens`` ends. ``explain``: the answer says why the tokens behind the hit are missed. :class:`Find`
    explains the remaining fields.
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
    """The pages of one layer group that a hit needs and the client does not have. ``lease`` holds these
    pages, in prompt order. For a chain, they are the pages of the first ``tokens`` tokens. ``tiers``,
    ``path`` and ``known`` are as in :class:`Found`. Other hosts probably have the pages that end at the
    tokens ``remote_ends`` (uint32)."""

    lease: int
    tokens: int
    tiers: Annotated[list[tuple[Text, int]], Meta(max_length=MAX_CHUNKS)]
    path: int = 0
    known: int = 0
    remote_ends: Payload = b""


class HitFound(Message):
    """The answer to :class:`FindHit`. The hit has ``tokens`` tokens. The groups that need every token have
    pages up to token ``branch``. With pages that other hosts probably have, the hit would be
    ``remote_tokens`` tokens longer. ``rates`` is as in :class:`Found`. If the request has ``explain``,
    ``misses`` are the spans of missed tokens (:class:`~tierstore.explanation.Miss`). A span's layer group is
    a position in the request's ``chains`` followed by ``named``."""

    id: int
    tokens: int
    branch: int
    chains: Annotated[list[GroupFound], Meta(max_length=MAX_GROUPS)]
    named: Annotated[list[GroupFound], Meta(max_length=MAX_GROUPS)]
    remote_tokens: int = 0
    rates: Annotated[dict[Text, tuple[float, float, float]], Meta(max_length=256)] = {}
    misses: Annotated[list[Miss], Meta(max_length=MAX_CHUNKS)] = []


class FetchRemote(Message):
    """Fetch ``count`` whole chunks of a prompt, from chunk ``first`` on, from other hosts into the arena."""

    id: int
    prompt: PromptPart
    first: int
    count: int
    wait_s: float


class FetchedRemote(Message):
    id: int
    chunks: int  # how many chunks from ``first`` on have arrived, without a gap; a lookup then finds them


class Prefetch(Message):
    """Load the pages of a lease, from page ``first`` on, into the arena, in prefix order."""

    id: int
    lease: int
    wait_s: float
    first: int = 0


class Prefetched(Message):
    id: int
    pages: int  # how many pages from ``first`` on are in the arena, without a gap


class Locate(Message):
    """Load ``count`` pages of a lease, from page ``first`` on, into the arena and return their offsets."""

    id: int
    lease: int
    first: int
    count: int
    wait_s: float


class Offsets(Message):
    """The answer to :class:`Locate`: ``offsets`` (uint64, little-endian) in the arena of the first of the
    requested pages. Pages are left out at the end if the wait ended, a page was damaged or the arena was
    full. The pages stay at these offsets until the lease ends. ``checksums`` (uint64, little-endian) are the
    XXH3-64 of the saved pages, 0 if unknown."""

    id: int
    offsets: Payload
    checksums: Payload = b""


class Fetch(Message):
    """Like :class:`Locate`, but return the pages' bytes, for clients on other hosts: at most
    ``MAX_FETCH_BYTES``, or one page of any size."""

    id: int
    lease: int
    first: int
    count: int
    wait_s: float


class Fetched(Message):
    """The answer to :class:`Fetch`. One frame follows for each of the first ``pages`` requested pages."""

    id: int
    pages: int
    checksums: Payload  # XXH3-64 of each page (uint64, little-endian)


class ReportDamage(Message):
    """One-way: a page of a lease does not match its checksum in the arena. The daemon verifies the page, and
    drops a damaged copy."""

    lease: int
    page: int


class Release(Message):
    """One-way: release these leases. Unknown leases are ignored."""

    leases: Numbers


# -- writing -------------------------------------------------------------------------------------------


class HintPart(Message):
    """A hint about the future use of pages; see :class:`tierstore.types.Hint`."""

    ttl_s: float | None = None
    reuse: Text | None = None
    priority: int = 0
    elsewhere: bool = False


class Reserve(Message):
    """Reserve slots for ``count`` pages of a prompt, from page ``first`` on; the last one may be partial. The
    daemon answers when no other client has a reservation for one of these pages. ``session`` is the name of a
    session of the client's tenant, of at most 256 characters (empty: no session).

    With ``count`` 0 the message only sends ``hint`` and ``session``, for the prompt's pages. With the hint
    ``done``, named pages that no other session has saved are removed from every tier as soon as no lease or
    pin holds them."""

    id: int
    prompt: PromptPart
    first: int
    count: int
    hint: HintPart | None = None
    session: Text = ""


class Reserved(Message):
    """The answer to :class:`Reserve`: the ``positions`` of the pages to write (uint32, counted from
    ``first``) and the ``offsets`` of their slots (uint64). Pages that are already stored, and pages for which
    no slot is free, are left out. When all positions are committed, the first ``stored_tokens`` tokens of the
    prompt are stored. Later messages may refer to ``path`` with up to ``known`` chunks: a :class:`Reserve` at
    once, other messages after the commit."""

    id: int
    reservation: int  # 0: nothing to write
    positions: Payload
    offsets: Payload
    stored_tokens: int
    path: int = 0
    known: int = 0


class Write(Message):
    """Write pages of a reservation, one frame each, for clients on other hosts. The first frame is for
    ``positions[first]`` of the reservation, and the others for the positions after it."""

    id: int
    reservation: int
    first: int


class Written(Message):
    id: int


class Commit(Message):
    """End a reservation. The pages at the positions ``done`` (uint32) are complete, and ``checksums``
    (uint64) are their XXH3-64. All other pages of the reservation are aborted."""

    id: int
    reservation: int
    done: Payload
    checksums: Payload


class Committed(Message):
    id: int
    pages: int


class Finish(Message):
    """End a session, whose name was in a :class:`Reserve`. Pages that only this session has used are then
    evicted first."""

    id: int
    session: Text


class Finished(Message):
    id: int
    pages: int  # how many pages only this session has used


class Abort(Message):
    """One-way: abort a reservation."""

    reservation: int


# -- pins, eviction, forgetting and statistics ---------------------------------------------------------


class Pin(Message):
    """Pin the stored whole chunks of a prompt's first ``max_tokens`` tokens (-1: all). ``undo``: undo the
    newest pin of exactly this prompt by the same tenant, for any ``max_tokens``."""

    id: int
    prompt: PromptPart
    undo: bool = False
    max_tokens: int = -1


class Pinned(Message):
    id: int
    tokens: int


class Unpin(Message):
    """Undo all pins of a tenant (empty: of clients without a tenant; nil: all pins). A client with a tenant
    may not send this."""

    id: int
    tenant: Text | None


class Unpinned(Message):
    id: int
    pages: int


class Evict(Message):
    """Evict up to ``pages`` pages from ``tier`` (-1: all evictable pages)."""

    id: int
    tier: Text
    pages: int


class Evicted(Message):
    id: int
    pages: int


class Forget(Message):
    """Forget all pages of a tenant, of a model (given by its name), of a model of a tenant, or of a session
    of a tenant. A nil field is not given. A client with a tenant forgets only its own pages; ``tenant`` is
    then the tenant in the client's own identities."""

    id: int
    tenant: Text | None = None
    model: Text | None = None
    session: Text | None = None


class Forgotten(Message):
    """The answer to :class:`Forget`. No lookup finds the pages any more. In an encrypted store, the keys of
    the tenant or model have been erased."""

    id: int
    receipt: ForgetReceipt


class PagesForgotten(Message):
    """The daemon sends this to its clients after a forget, with ``id`` 0. The client must not use pages of
    ``identities`` any more. ``pages`` are pairs of an identity and the keys of some of its pages; the client
    must not use these pages and the pages behind them. The client has then been informed of all forgets up to
    ``number``."""

    id: int
    number: int
    identities: Numbers
    pages: Annotated[list[tuple[int, Payload]], Meta(max_length=MAX_GROUPS)] = []


class Flush(Message):
    """Wait until all pages that have been committed so far are on disk."""

    id: int
    wait_s: float


class Flushed(Message):
    id: int
    done: bool


class Identities(Message):
    """List the identities that clients have registered or that have pages on disk, ordered by digest, from
    the first digest above ``after`` on. A client with a tenant gets only the identities of its tenant."""

    id: int
    after: Payload = b""


class IdentitiesAnswer(Message):
    id: int
    identities: Annotated[list[IdentityFields], Meta(max_length=1 << 16)]  # as the client registers them
    more: Payload = b""  # the value of ``after`` for the next request; empty at the end


class MissedRequests(Message):
    """List the last ``most`` requests with missed tokens; the daemon keeps 256. A client with a tenant gets
    only requests of its tenant."""

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
    """Return the msgpack part of a message."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """Decode a request. Raise :class:`msgspec.MsgspecError` for other data."""
    return _requests.decode(frame)


def decode_answer(frame: bytes | memoryview) -> Answer:
    """Decode an answer. Raise :class:`msgspec.MsgspecError` for other data."""
    return _answers.decode(frame)
