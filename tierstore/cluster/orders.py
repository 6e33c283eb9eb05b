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
    """The whole chunks of a prompt, from its beginning on. Each chunk has 16 bytes of ``keys`` and
    ``chunk_tokens`` uint32 of ``tokens``. With ``named``, the chunks are found by name, and ``depth`` pages
    of the prompt come before the first of them."""

    identity: IdentityFields
    page_bytes: int
    chunk_tokens: int
    keys: Payload
    tokens: Payload
    named: bool = False
    depth: int = 0


class Origin(msgspec.Struct, array_like=True):
    """The prompt that consecutive objects belong to: they are the last ``count`` chunks of ``pages``.
    ``parent`` is the name of the object before them; empty for a prompt's first chunk and for named
    chunks."""

    pages: PromptPages
    count: int
    parent: Text = ""

    @classmethod
    def of(cls, pages: PromptPages, chunks: Sequence[int], parent: str) -> Origin:
        """Return the origin of these chunks of a prompt. Chained chunks must be consecutive."""
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
"""Tenant, model and id of each shared key."""


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
    lifetime_s: float = 0.0  # … and limit of the age of its objects; 0: none
    keys_url: Text = ""  # bucket with the keys of sealed pages
    sharing_key: Payload = b""  # decrypts these keys; empty if pages are not sealed
    held: HeldKeys = msgspec.field(default_factory=list)  # the keys in the last :class:`KeysHeld`


class Look(AgentOrder):
    """Ask how many consecutive chunks from ``first`` on the shared store probably has; for named chunks, ask
    which chunks it has."""

    id: int
    pages: PromptPages
    first: int


class FetchOrder(AgentOrder):
    """Fetch as many of the chunks ``first … first + count`` as possible into the daemon's memory. With
    ``promised``, another host is publishing these chunks, so the agent waits for those that are missing."""

    id: int
    pages: PromptPages
    first: int
    count: int
    wait_s: float
    promised: bool = False


class Stop(AgentOrder):
    """Cancel the order with this number. The agent still answers it."""

    id: int


class Publish(AgentOrder):
    """Publish the first ``count`` chunks, unless the shared store has them. The agent sends no answer."""

    pages: PromptPages
    count: int


class DeleteKeys(AgentOrder):
    """Delete the shared keys that a :class:`~tierstore.types.Forgettable` covers, and the keys of ``scopes``
    (tenant and model). The agent makes and uses no key of these scopes until :class:`Resume` arrives."""

    id: int
    tenant: Text | None
    model: Text | None
    scopes: Annotated[list[tuple[Text, Text]], Meta(max_length=1 << 20)]


class Resume(AgentOrder):
    """The daemon has finished the forget that a :class:`DeleteKeys` or :class:`Vanished` with this ``id``
    began."""

    id: int


class Ready(AgentOrder):
    """The agent has opened the shared store. ``trouble`` says why the shared store does not work yet
    (:class:`Trouble`); empty if it works."""

    transport: Text
    trouble: Text = ""


class Away(AgentOrder):
    """The agent could not open the shared store, and ends. ``hopeless`` says that another attempt would fail,
    too."""

    message: Text
    hopeless: bool


class Trouble(AgentOrder):
    """The reason why the shared store does not work at present; empty when it works again."""

    message: Text


class Looked(AgentOrder):
    """The answer to :class:`Look`. For named chunks, ``there`` has the positions (uint32, ascending) of the
    chunks in the shared store."""

    id: int
    chunks: int
    there: Payload = b""


class FetchDone(AgentOrder):
    id: int
    chunks: int


class KeysDeleted(AgentOrder):
    """The answer to :class:`DeleteKeys`: the number of deleted ``keys``. ``failed`` says why some keys may
    remain; empty if none remains."""

    id: int
    keys: int
    failed: Text = ""


class Vanished(AgentOrder):
    """Another host has forgotten this tenant and model. The daemon answers with :class:`Resume`."""

    id: int
    tenant: Text
    model: Text


class KeysHeld(AgentOrder):
    """The shared keys that exist now. If one of these keys is missing when the next agent starts, another
    host has forgotten the key's tenant and model meanwhile."""

    held: HeldKeys


class Counted(AgentOrder):
    """Counts since the last :class:`Counted`."""

    counts: Annotated[dict[Text, int], Meta(max_length=1024)]


class Failed(AgentOrder):
    """A bug in tierstore or the shared store has caused an unexpected error. The agent continues."""

    message: Text


ToAgent: TypeAlias = Begin | Look | FetchOrder | Stop | Publish | DeleteKeys | Resume
ToDaemon: TypeAlias = (
    Ready | Away | Trouble | Looked | FetchDone | KeysDeleted | Vanished | KeysHeld | Counted | Failed
)
