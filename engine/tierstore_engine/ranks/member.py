"""The model and the weights of one rank, connected to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierstore.tiers.divided_pool import DeviceShare
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import PartAttention
from tierstore_engine.config import ModelConfig
from tierstore_engine.layer_weights import ModelWeights
from tierstore_engine.loaded import OpenModel, make_memory
from tierstore_engine.model import Model
from tierstore_engine.quantised import MatrixKernels
from tierstore_engine.ranks.collective import Collective, Ranks
from tierstore_engine.ranks.sequence import SequenceAttention, TokenSplit
from tierstore_engine.ranks.share import RankPlace, Share, config_of, read_share
from tierstore_engine.weights import WeightsDigest, load_weights, open_weights, random_weights


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of ranks that a rank is in. A group is None if it would contain this rank only. The ranks of
    ``heads`` share the heads of one part of the tokens. The ranks of ``tokens`` have the same heads of
    different parts."""

    heads: Collective | None
    tokens: Collective | None

    @classmethod
    def meet(cls, place: RankPlace, folder: str, device: str) -> RankGroups:
        """Connect all ranks through files in ``folder``. Block until all ranks are connected. This rank
        computes on ``device``."""
        heads, tokens = place.heads, place.tokens
        groups = cls(
            Collective(heads, f"{folder}/heads-{tokens.rank}", device) if heads.count > 1 else None,
            Collective(tokens, f"{folder}/tokens-{heads.rank}", device) if tokens.count > 1 else None,
        )
        for group in (groups.heads, groups.tokens):
            if group is not None:
                group.meet(0)  # after this, no rank needs the file of any group
        return groups

    def abort(self) -> None:
        """End operations that wait for a lost rank; see :meth:`Collective.abort
        <tierstore_engine.ranks.collective.Collective.abort>`."""
        for group in (self.heads, self.tokens):
            if group is not None:
                group.abort()


def read_weights(
    opened: OpenModel,
    share: Share,
    *,
    seed: int,
    digest: WeightsDigest | None = None,
) -> ModelWeights:
    """Return a rank's weights of a model, and add all weights to ``digest``. Raises the errors of
    :func:`read_share`."""
    config, source = opened.config, opened.source
    if share.count > 1:
        return read_share(config, source, share, seed=seed, device=opened.device, digest=digest)
    if source is None:
        weights = random_weights(config, seed=seed, device=opened.device)
    else:
        weights = load_weights(
            config,
            source,
            device=opened.device,
            expand=opened.expand,
            on_disk=opened.on_disk,
            kernels=None if opened.device == "cpu" else _matrix_kernels(opened),
        )
    if digest is not None:
        digest.add_all(config, weights)
    return weights


def _matrix_kernels(opened: OpenModel) -> MatrixKernels | None:
    """Return the kernels of a GPU for weights that stay quantised. Return None if there are no such
    weights."""
    assert opened.source is not None
    with open_weights(opened.source) as stored:
        if opened.expand or stored.quantised is None:
            return None
    from tierstore_engine.kernels.cupy_launcher import CupyLauncher
    from tierstore_engine.kernels.packed import PackedKernels

    launcher = CupyLauncher(opened.device)
    return PackedKernels(launcher, dtype=opened.config.dtype, device=opened.device)


def model_of(
    config: ModelConfig,
    weights: ModelWeights,
    pools: Sequence[PagePool],
    place: RankPlace,
    heads: Ranks | None,
    tokens: Ranks | None,
    part_large_pages: int,
    device: str = "cpu",
) -> Model:
    """Return the model of one rank on ``device``. ``config`` is the configuration of the whole model. The
    pages of its part are the first of ``pools``. A part has ``part_large_pages`` large pages."""
    own = config_of(config, place.heads)
    if isinstance(pools[0].region, DeviceShare):  # the pages on a GPU have the heads of this rank only
        kv = own.kv.of_heads(range(own.first_kv_head, own.first_kv_head + own.kv_heads))
        own = replace(own, first_kv_head=0, kv=kv)
    memories = [make_memory(pool, own) for pool in pools]
    if tokens is None:
        return Model(own, weights, memories, device=device, ranks=heads)
    split = TokenSplit(tokens, heads, own, [part_large_pages * pool.books.per_large for pool in pools])
    divided = [
        SequenceAttention(memory, pool, own, split, group) if isinstance(memory, PartAttention) else memory
        for group, (memory, pool) in enumerate(zip(memories, pools, strict=True))
    ]
    return Model(own, weights, divided, device=device, ranks=heads, split=split)
