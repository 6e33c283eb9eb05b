"""What the daemon and its agents say to each other, over a socketpair, each message behind its length
(``wire/framing.py``), in msgpack."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from tierstore.wire.messages import IdentityFields, Payload, Text


class AgentOrder(msgspec.Struct, tag=True, array_like=True):
    """Anything that is said."""


class PromptPages(msgspec.Struct, array_like=True):
    """The whole chunks of a prompt, from its beginning on: 16 bytes of ``keys`` and ``chunk_tokens`` uint32
    of ``tokens`` for each. ``named``: chunks that follow nothing, ``depth`` chunks behind the prompt's
    beginning."""

    identity: IdentityFields
    page_bytes: int
    chunk_tokens: int
    keys: Payload
    tokens: Payload
    named: bool = False
    depth: int = 0


class Begin(AgentOrder):
    """The first one: where the daemon listens and where the shared store is."""

    daemon: Text
    url: Text
    protocol: Text
    devices: Text
    host: Text
    secret: Payload
    staging_bytes: int
    bytes_per_s: int  # of what is published; 0: any number


class Look(AgentOrder):
    """How many chunks from ``first`` on, one behind the other, the shared store seems to have; of named ones,
    which."""

    id: int
    pages: PromptPages
    first: int


class FetchOrder(AgentOrder):
    """Have chunks ``first … first + count`` come into the daemon's memory, as far as they do. ``promised``:
    somebody is publishing them, and those that are not there yet are waited for."""

    id: int
    pages: PromptPages
    first: int
    count: int
    wait_s: float
    promised: bool = False


class Stop(AgentOrder):
    """What was ordered under this number is not wanted any more. It is answered all the same."""

    id: int


class Publish(AgentOrder):
    """The first ``count`` chunks may be of use to others. No answer."""

    pages: PromptPages
    count: int


class Ready(AgentOrder):
    """The agent has opened the shared store."""

    transport: Text


class Away(AgentOrder):
    """It could not, and ends. ``hopeless``: it is not worth trying again."""

    message: Text
    hopeless: bool


class Looked(AgentOrder):
    """``there``: of named chunks, the places (uint32, ascending) of those that are."""

    id: int
    chunks: int
    there: Payload = b""


class FetchDone(AgentOrder):
    id: int
    chunks: int


class Counted(AgentOrder):
    """What has been counted since the last time."""

    counts: Annotated[dict[Text, int], Meta(max_length=1024)]


class Failed(AgentOrder):
    """Something went wrong that was not foreseen: a bug of ours or the shared store's. The agent goes on."""

    message: Text


ToAgent: TypeAlias = Begin | Look | FetchOrder | Stop | Publish
ToDaemon: TypeAlias = Ready | Away | Looked | FetchDone | Counted | Failed
