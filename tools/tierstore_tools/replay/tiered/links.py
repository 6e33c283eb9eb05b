"""The time that moving bytes takes."""

from __future__ import annotations


class Link:
    """A way that carries one load at a time, in the order asked for."""

    def __init__(self, gb_per_s: float) -> None:
        self._bytes_per_s = gb_per_s * 1e9
        self.free_at_s = 0.0
        self.moved_bytes = 0

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take once they are under way."""
        return nbytes / self._bytes_per_s

    def would_end(self, now_s: float, nbytes: int) -> float:
        """When a load asked for now would be there. Changes nothing."""
        return max(now_s, self.free_at_s) + self.seconds(nbytes) if nbytes else now_s

    def move(self, now_s: float, nbytes: int) -> float:
        """Ask for a load now. Returns when it is there."""
        end = self.would_end(now_s, nbytes)
        if nbytes:
            self.free_at_s = end
            self.moved_bytes += nbytes
        return end


class WriteBehind:
    """Writes to disk that nobody waits for. What would wait with more than ``most_bytes`` is dropped."""

    def __init__(self, gb_per_s: float, most_bytes: int) -> None:
        self._link = Link(gb_per_s)
        self._most_bytes = most_bytes
        self.dropped_blocks = 0

    @property
    def written_bytes(self) -> int:
        return self._link.moved_bytes

    def room(self, now_s: float, block_bytes: int) -> int:
        """Blocks that the queue has room for now."""
        waiting = max(0.0, self._link.free_at_s - now_s) / self._link.seconds(1)
        return max(0, int((self._most_bytes - waiting) // block_bytes))

    def write(self, now_s: float, nbytes: int) -> None:
        self._link.move(now_s, nbytes)
