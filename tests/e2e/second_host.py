"""Another host on this machine: a network namespace behind a link of 1 Gbit/s.

Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2. A queue of a few packets before the link makes it
lose some: bursts overflow it, as they do in a switch.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import count

RATE = "1gbit"
_numbers = count(1)


class Unavailable(Exception):
    """This machine does not let us make one; the text says why."""


class SecondHost:
    """``run`` prefixes a command so that it runs there. ``address`` is the other host's, seen from here."""

    def __init__(self, *, queue: str = "latency 50ms burst 256kb") -> None:
        number = next(_numbers)
        self._namespace = f"tierstore-test-{number}"
        self._here, self._there = f"tsh{number}", f"tst{number}"
        self.address = f"10.203.{number}.2"
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise Unavailable("iproute2 (ip and tc) is not installed")
        self._ip("netns", "add", self._namespace)
        try:
            self._ip("link", "add", self._here, "type", "veth", "peer", "name", self._there)
            self._ip("link", "set", self._there, "netns", self._namespace)
            self._ip("address", "add", f"10.203.{number}.1/30", "dev", self._here)
            self._ip("link", "set", self._here, "up")
            _run(*self.run("ip", "address", "add", f"{self.address}/30", "dev", self._there))
            _run(*self.run("ip", "link", "set", self._there, "up"))
            _run(*self.run("ip", "link", "set", "lo", "up"))
            shape = ("root", "tbf", "rate", RATE, *queue.split())
            _run("tc", "qdisc", "add", "dev", self._here, *shape)
            _run(*self.run("tc", "qdisc", "add", "dev", self._there, *shape))
        except Unavailable:
            self.close()
            raise

    def run(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace, *command]

    def cut(self) -> None:
        """Pull the cable."""
        self._ip("link", "set", self._here, "down")

    def mend(self) -> None:
        self._ip("link", "set", self._here, "up")

    def lost_packets(self) -> int:
        """Dropped on their way, in both directions, so far."""
        there = _run(*self.run("tc", "-s", "-j", "qdisc", "show", "dev", self._there))
        here = _run("tc", "-s", "-j", "qdisc", "show", "dev", self._here)
        return sum(queue["drops"] for text in (here, there) for queue in json.loads(text))

    def close(self) -> None:
        subprocess.run(["ip", "netns", "delete", self._namespace], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", self._here], check=False, capture_output=True)

    def _ip(self, *arguments: str) -> None:
        _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
