"""Messages between rank 0 and another rank, pickled, over a private socket pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tierstore_engine.loaded import OpenModel
from tierstore_engine.ranks.pools import HostPools, RankPools
from tierstore_engine.ranks.share import RankPlace
from tierstore_engine.step import Step
from tierstore_engine.weights import FileStates


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The first message. ``opened`` names the rank's own device. ``files`` has size and time of each file of
    weights when rank 0 began to read them. ``weights_fd`` is the inherited descriptor of weights that all
    ranks share, or None if the rank reads its own weights. A part has ``part_large_pages`` large pages.
    ``meeting`` is the folder of the files through which ranks connect."""

    opened: OpenModel
    place: RankPlace
    seed: int
    files: FileStates
    weights_fd: int | None
    pools: RankPools
    part_large_pages: int
    meeting: str
    threads: int

    @property
    def fds(self) -> list[int]:
        """Return the descriptors that the process inherits."""
        pools = self.pools.fd if isinstance(self.pools, HostPools) else None
        return [fd for fd in (pools, self.weights_fd) if fd is not None]


@dataclass(frozen=True, slots=True)
class RankPing:
    """Rank 0 asks whether the process is alive. The process also answers during a step."""


@dataclass(frozen=True, slots=True)
class RankPong:
    """The answer to :class:`RankPing`."""


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """The rank has its weights and pools, and waits for :class:`RankConnect`."""


@dataclass(frozen=True, slots=True)
class RankConnect:
    """All ranks are loaded. Rank 0 tells a rank to connect to the other ranks and to make its model."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank waits for steps."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank ends because of an error."""

    why: str


ToRank: TypeAlias = RankSetup | RankConnect | Step | RankPing
FromRank: TypeAlias = RankPong | RankLoaded | RankReady | RankFailed
