"""Tensors between ranks: on GPUs by NCCL, and otherwise by gloo over this host's loopback.

NCCL has not run on a GPU here. Its operations are in the order of torch's current stream, so their results
are valid for work on that stream. Only :meth:`Ranks.meet` waits on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from tierstore_engine.moving import to_device
from tierstore_engine.ranks.share import Share

_distributed: Any = torch.distributed  # its types leave out process groups that are not the default one
_MEETING_S = 60.0
_LONGEST_S = 3600.0
"""How long the libraries wait for a rank. One that does not answer is found much earlier, by its
heartbeat."""


class Passing(Protocol):
    """Tensors that are being sent and received."""

    def wait(self) -> None:
        """Wait until all tensors have arrived, and the sent ones may be overwritten. On a GPU, only later
        work on the current stream waits."""


class Ranks(Protocol):
    """A group of ranks, as one of them sees it. All ranks call the methods in the same order, and know the
    shapes of each other's tensors. ``share`` is this rank's."""

    share: Share

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that this rank has sent."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' ``x``, with the same bits in each. ``x`` may be overwritten."""

    def columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """At rank 0, return the parts of all ranks side by side: ``total`` columns. At other ranks, return
        ``part``."""

    def exchange(self, to: Mapping[int, torch.Tensor], of: Mapping[int, torch.Tensor]) -> Passing:
        """Start to send a tensor to each of some ranks, and to receive tensors of others. These must stay
        until :meth:`Passing.wait` returns. Empty tensors are not sent."""

    def meet(self, number: float) -> list[float]:
        """Wait for all ranks. Return each rank's ``number``. The bytes of these messages do not count."""


class _Works:
    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors  # must stay alive until they are sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Collective:
    """:class:`Ranks` of one process. ``summed_bytes`` are those of the tensors passed to sums, and
    ``passed_bytes`` those of the tensors sent to single ranks."""

    def __init__(self, share: Share, meeting: str, device: str = "cpu") -> None:
        """Connect all ranks through the file ``meeting``, which does not exist yet. Block until all are
        connected. Their tensors are on ``device``."""
        self.share = share
        self.summed_bytes = 0
        self.passed_bytes = 0
        self._device = torch.device(device)
        store = _distributed.FileStore(meeting, share.count)
        store.set_timeout(timedelta(seconds=_MEETING_S))
        self._group = (_gloo if self._device.type == "cpu" else _nccl)(store, share, self._device)
        self.meet(0)  # after this no rank needs the file

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that this rank sends. Sums count as if they use a ring: ``2 (n - 1) / n`` of each
        tensor (Patarasuk and Yuan 2009). Gathers do not count, because rank 0 only receives them."""
        return self.summed_bytes * 2 * (self.share.count - 1) / self.share.count + self.passed_bytes

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if x.nbytes:
            self.summed_bytes += x.nbytes
            self._group.allreduce([x]).wait()
        return x

    def columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        if not len(part):
            return part.new_empty(0, total)
        widths = [len(Share(rank, self.share.count).cut(total)) for rank in range(self.share.count)]
        widest = max(widths)
        mine = part.new_zeros(len(part), widest)
        mine[:, : part.shape[1]] = part
        if not self.share.first:
            self._group.gather([], [mine], _root()).wait()
            return part
        parts = [torch.empty_like(mine) for _ in widths]
        self._group.gather([parts], [mine], _root()).wait()
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)

    def exchange(self, to: Mapping[int, torch.Tensor], of: Mapping[int, torch.Tensor]) -> Passing:
        going = {rank: tensor.contiguous() for rank, tensor in to.items() if tensor.nbytes}
        coming = {rank: tensor for rank, tensor in of.items() if tensor.nbytes}
        on_gpu = self._device.type != "cpu" and bool(going or coming)
        if on_gpu:  # otherwise NCCL's operations would wait for one another
            self._group._start_coalescing()
        works = [self._group.recv([tensor], rank, 0) for rank, tensor in coming.items()]
        works += [self._group.send([tensor], rank, 0) for rank, tensor in going.items()]
        if on_gpu:
            works = [self._group._end_coalescing()]
        self.passed_bytes += sum(tensor.nbytes for tensor in going.values())
        return _Works(works, [*going.values(), *coming.values()])

    def abort(self) -> None:
        """End all operations on a GPU, whose results are then wrong. Without this, they would wait for a rank
        that has ended. Any thread may call it. (gloo notices the end by itself.)"""
        if self._device.type != "cpu":
            self._group.abort()

    def meet(self, number: float) -> list[float]:
        numbers = torch.zeros(self.share.count, dtype=torch.float64)
        numbers[self.share.rank] = number
        numbers = to_device(numbers, self._device)
        self._group.allreduce([numbers]).wait()
        return numbers.tolist()


def _gloo(store: Any, share: Share, device: torch.device) -> Any:
    """Return gloo's group of all ranks, for tensors on the CPU."""
    gloo = _distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=_LONGEST_S)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, share.rank, share.count, options)


def _nccl(store: Any, share: Share, device: torch.device) -> Any:
    """Return NCCL's group of all ranks, for tensors on their GPUs; this rank's is ``device``."""
    nccl = _distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=_LONGEST_S)
    options.is_high_priority_stream = False
    group = nccl(store, share.rank, share.count, options)
    group.eager_connect_single_device(device)
    return group


def _root() -> Any:
    options = _distributed.GatherOptions()
    options.rootRank = 0
    return options
