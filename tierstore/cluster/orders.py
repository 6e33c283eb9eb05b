"""Messages between the daemon and its agents: length-prefixed msgpack (``wire/framing.py``) over a
socketpair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from tierstore.keys import KEY_BYTES, TOKEN_BYTES
from tierstore.wire.messages import IdentityFields, Payload, Text


class AgentOrder(msgspec.Struct, tag=True, array_like=True):
    """The base of all messages."""


class PromptPages(msgspec.Struct, array_like=True):
    """The whole chunks of a prompt, from its beginning on: 16 bytes of ``keys`` and ``chunk_tokens`` uint32
    of ``tokens`` for each. ``named``: named chunks, at depth ``depth`` of the prompt."""

    identity: IdentityFields
    page_bytes: int
    chunk_tokens: int
    keys: Payload
    tokens: Payload
    named: bool = False
    depth: int = 0


class Origin(msgspec.Struct, array_like=True):
    """The prompt of consecutive objects: they are the last ``count`` chunks of ``pages``. ``parent`` is the
    name of the object before them; empty for a first chunk and for named chunks."""

    pages: PromptPages
    count: int
    parent: Text = ""

    @classmethod
    def of(cls, pages: PromptPages, chunks: Sequence[int], parent: str) -> Origin:
        """Return the origin of these chunks of a prompt, which follow one another if they are chained."""
        kept = chunks if pages.named else range(chunks[-1] + 1)
        width = pages.chunk_tokens * TOKEN_BYTES
        keys = b"".join([pages.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in kept])
        tokens = b"".join([pages.tokens[at * width : (at + 1) * width] for at in kept])
        part = msgspec.structs.replace(pages, keys=keys, tokens=tokens, depth=pages.depth + kept[0])
        return cls(part, len(chunks), "" if pages.named else parent)


MOST_KEYS = 65_536

HeldKeys: TypeAlias = Annotated[
    list[tuple[Text, Text, Annotated[bytes, Meta(max_length=64)]]], Meta(max_length=MOST_KEYS)
]
"""Tenant, model and id of shared keys."""


class Begin(AgentOrder):
    """The first message: the addresses of the daemon and of the shared store."""

    daemon: Text
    url: Text
    protocol: Text
    devices: Text
    host: Text
    secret: Payload
    staging_bytes: int
    bytes_per_s: int  # limit of publishing; 0: none
    most_bytes: int = 0  # limit of an object store
    lifetime_s: float = 0.0  # … and of the age of its objects; 0: none
    keys_url: Text = ""  # bucket with the keys of sealed pages
    sharing_key: Payload = b""  # opens them; empty: pages are not sealed
    held: HeldKeys = msgspec.field(default_factory=list)  # as the last :class:`KeysHeld` has them


class Look(AgentOrder):
    """Ask how many chunks from ``first`` on, without a gap, the shared store probably has; for named chunks,
    which."""

    id: int
    pages: PromptPages
    first: int


class FetchOrder(AgentOrder):
    """Fetch chunks ``first … first + count`` into the daemon's memory, as many as possible. ``promised``:
    another host is publishing them, so wait for those that are not there yet."""

    id: int
    pages: PromptPages
    first: int
    count: int
    wait_s: float
    promised: bool = False


class Stop(AgentOrder):
    """Cancel the order with this number. It is answered nevertheless."""

    id: int


class Publish(AgentOrder):
    """Publish the first ``count`` chunks, if other hosts may need them. Not answered."""

    pages: PromptPages
    count: int


class DeleteKeys(AgentOrder):
    """Delete the shared keys that a :class:`~tierstore.types.Forgettable` covers, and those of ``scopes``
    (tenant and model). Make and use no such key until :class:`Resume`."""

    id: int
    tenant: Text | None
    model: Text | None
    scopes: Annotated[list[tuple[Text, Text]], Meta(max_length=1 << 20)]


class Resume(AgentOrder):
    """The daemon has carried out the forget with the ``id`` of a :class:`DeleteKeys` or :class:`Vanished`."""

    id: int


class Ready(AgentOrder):
    """The agent has opened the shared store. ``trouble`` says why it does not work yet (:class:`Trouble`)."""

    transport: Text
    trouble: Text = ""


class Away(AgentOrder):
    """The agent could not open the shared store, and ends. ``hopeless``: another try would fail, too."""

    message: Text
    hopeless: bool


class Trouble(AgentOrder):
    """The shared store does not work at present, for this reason; empty when it works again."""

    message: Text


class Looked(AgentOrder):
    """``there``: for named chunks, the positions (uint32, ascending) of those in the shared store."""

    id: int
    chunks: int
    there: Payload = b""


class FetchDone(AgentOrder):
    id: int
    chunks: int


class KeysDeleted(AgentOrder):
    """The answer to :class:`DeleteKeys`: the number of deleted ``keys``. ``failed`` says why some may remain;
    empty if none does."""

    id: int
    keys: int
    failed: Text = ""


class Vanished(AgentOrder):
    """Another host has forgotten a tenant and model. Answered with :class:`Resume`."""

    id: int
    tenant: Text
    model: Text


class KeysHeld(AgentOrder):
    """The shared keys that exist now. If one of them is gone when the next agent starts, another host has
    forgotten its tenant and model meanwhile."""

    held: HeldKeys


class Counted(AgentOrder):
    """Counts since the last such message."""

    counts: Annotated[dict[Text, int], Meta(max_length=1024)]


class Failed(AgentOrder):
    """An unexpected error occurred, because of a bug in tierstore or the shared store. The agent
    continues."""

    message: Text


ToAgent: TypeAlias = Begin | Look | FetchOrder | Stop | Publish | DeleteKeys | Resume
ToDaemon: TypeAlias = (
    Ready | Away | Trouble | Looked | FetchDone | KeysDeleted | Vanished | KeysHeld | Counted | Failed
)
