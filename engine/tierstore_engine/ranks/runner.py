"""The runner of rank 0: it computes its share of each step, with the other ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import torch

from tierstore.tiers.hbm import PagePool
from tierstore_engine.config import ModelConfig
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.model import Model
from tierstore_engine.ranks.member import RankGroups, model_of
from tierstore_engine.ranks.messages import RankConnect
from tierstore_engine.ranks.others import Others
from tierstore_engine.ranks.pools import own_pools
from tierstore_engine.ranks.share import RankPlace, device_of
from tierstore_engine.sampling import Choice, Draw, sample
from tierstore_engine.step import PartialStep, Step


class RankedRunner:
    """A model over several ranks. Used by one thread. Made by :meth:`start`."""

    def __init__(
        self,
        config: ModelConfig,
        model: Model,
        others: Others,
        groups: RankGroups,
        folder: tempfile.TemporaryDirectory[str],
    ) -> None:
        self.config = config
        self._folder = folder
        self._model = model
        self._others = others
        self._groups = groups

    @classmethod
    def start(cls, model: LoadedModel, pools: Sequence[PagePool]) -> RankedRunner:
        """Start a process for each other rank of a divided model. Block until all ranks have their weights.
        The memory of ``pools`` is shared. Raises :class:`RankLostError` if a rank ends before that."""
        assert model.divided is not None
        place = RankPlace.of(0, heads=model.divided.heads, parts=model.divided.parts)
        device = device_of(model.device, 0)
        folder = tempfile.TemporaryDirectory(prefix="tierstore-ranks-")
        others = Others(model, pools, folder.name)
        try:
            with others.watched():
                others.wait_loaded()
                others.send(RankConnect())
                groups = others.unless_lost(lambda: RankGroups.meet(place, folder.name, device))
                others.when_lost = groups.abort
                part = model_of(
                    model.config,
                    model.weights,
                    own_pools(pools),
                    place,
                    groups.heads,
                    groups.tokens,
                    pools[0].large_pages.part_size,
                    device,
                )
        except BaseException:
            others.close()
            folder.cleanup()
            raise
        if device == "cpu":  # keep the folder, because NCCL may read its files later
            folder.cleanup()
        return cls(model.config, part, others, groups, folder)

    @property
    def summed_bytes(self) -> int:
        """The bytes of the tensors that rank 0 passed to sums over the heads."""
        return 0 if self._groups.heads is None else self._groups.heads.summed_bytes

    @property
    def sent_bytes(self) -> list[float]:
        """The bytes that the first rank of each part has sent to other ranks; see
        :attr:`Collective.sent_bytes <tierstore_engine.ranks.collective.Collective.sent_bytes>`."""
        if self._model.split is not None:
            return self._model.split.sent_bytes
        assert self._groups.heads is not None
        return [self._groups.heads.sent_bytes]

    def compute(self, step: Step) -> torch.Tensor:
        with self._others.watched():
            self._others.send(step)
            logits = self._model.compute(step)
            # Pages are copied after this. No rank uses a page any more, because the last sum has needed all
            # ranks.
            self.wait()
            return logits

    def advance(self, partial: PartialStep, layers: range) -> torch.Tensor | None:
        assert layers == range(self.config.layers), "all pages have arrived when a step begins"
        return self.compute(partial.step)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[Choice]:
        sampled = sample(logits, draws, rows).to_host()
        self.wait()
        return sampled.choices()

    def wait(self) -> None:
        if self._model.device != "cpu":
            torch.cuda.synchronize(self._model.device)

    def close(self) -> None:
        """End the other ranks."""
        self._others.close()
        self._folder.cleanup()
