"""The memory of a model's tensors, before they are filled."""

from __future__ import annotations

import torch

from tierstore.spec import LayerKind
from tierstore_engine.config import (
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    Mamba1Config,
    Mamba2Config,
    ModelConfig,
    SharedBlocksConfig,
    ShortConvConfig,
)
from tierstore_engine.errors import ModelError
from tierstore_engine.layer_weights import (
    AttentionWeights,
    BlockWeights,
    CrossWeights,
    DeltaWeights,
    ExpertsWeights,
    LatentWeights,
    LayerWeights,
    Mamba1Weights,
    Mamba2Weights,
    MixerWeights,
    MLPWeights,
    ModelWeights,
    PredictorWeights,
    SharedBlockWeights,
    ShortConvWeights,
)
from tierstore_engine.quantised import LowRank, Matrix, MatrixKernels, QuantisedMatrix


def allocate(
    config: ModelConfig, device: str, *, keep: bool = False, kernels: MatrixKernels | None = None
) -> ModelWeights:
    """Return weights to be filled. With ``keep``, quantised matrices stay quantised, and use ``kernels``."""
    if keep and config.names.fused_qkv == "heads":
        raise ModelError(
            "weights of an architecture that mixes the rows of Q, K and V are rearranged when they are read: "
            "give --expand-weights if they are quantised, and leave out --weights-on-disk"
        )
    make = Maker(config, device, keep=keep, kernels=kernels)
    embed = make.matrix(config.prompt_tokens, config.hidden_size)
    return ModelWeights(
        embed=embed,
        layers=tuple(make.layer(index) for index in range(config.layers + bool(config.predictor))),
        norm=make.norm(),
        head=embed if config.tied_embeddings else make.matrix(config.vocab_size, config.hidden_size),
        predictor=make.predictor() if config.predictor else None,
    )


class Maker:
    """Allocate the tensors of a model, without filling them. ``keep`` and ``kernels`` are as for
    :func:`allocate`."""

    def __init__(
        self,
        config: ModelConfig,
        device: str,
        *,
        keep: bool = False,
        kernels: MatrixKernels | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._keep = keep
        self._kernels = kernels
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._blocks: dict[int, BlockWeights] = {}

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def matrix(self, *shape: int) -> Matrix:
        if not self._keep:
            return self.empty(*shape)
        return QuantisedMatrix(*shape, dtype=self._dtype, kernels=self._kernels)

    def norm(self) -> torch.Tensor:
        hidden = self._config.hidden_size
        return self.empty(2, hidden) if self._config.norm_bias else self.empty(hidden)

    def predictor(self) -> PredictorWeights:
        hidden = self._config.hidden_size
        return PredictorWeights(
            embed_norm=self.norm(),
            hidden_norm=self.norm(),
            merge=self.matrix(hidden, 2 * hidden),
            norm=self.norm(),
        )

    def layer(self, index: int) -> LayerWeights:
        config = self._config
        bare = index in config.bare_layers
        mixer = self._mixer(index)
        mixer_normed = index not in config.beside and not isinstance(mixer, SharedBlockWeights)
        mlp_normed = not bare and config.parallel != "one norm"
        return LayerWeights(
            mixer_norm=self.norm() if config.pre_norms and mixer_normed else None,
            mixer=mixer,
            mlp_norm=self.norm() if config.pre_norms and mlp_normed else None,
            mlp=None if bare else self._feed_forward(config.experts_of(index)),
            mixer_post_norm=self.norm() if config.post_norms else None,
            mlp_post_norm=self.norm() if config.post_norms else None,
        )

    def _mixer(self, index: int) -> MixerWeights:
        config, kind = self._config, self._config.kind(index)
        if kind is LayerKind.MLA_LATENT:
            assert config.latent is not None
            return self._latent(config.latent)
        if kind is LayerKind.RECURRENT_STATE:
            if config.mamba is not None:
                return self._mamba2(config.mamba)
            if config.short_conv is not None:
                return self._short_conv(config.short_conv)
            if config.mamba1 is not None:
                return self._mamba1(config.mamba1)
            assert config.delta is not None
            return self._delta(config.delta)
        if kind is LayerKind.CROSS_ATTENTION:
            return self._cross()
        if config.shared is not None:
            return self._shared(config.shared, index)
        return self._attention(config.hidden_size)

    def _feed_forward(self, experts: ExpertsConfig | None) -> MLPWeights | ExpertsWeights:
        if experts is not None:
            return self._experts(experts)
        return self._mlp(self._config.intermediate_size, self._config.mlp_bias)

    def _shared(self, shared: SharedBlocksConfig, index: int) -> SharedBlockWeights:
        """Return a use of a block, which is made once."""
        config, hidden = self._config, self._config.hidden_size
        number = shared.block(index)
        if number not in self._blocks:
            self._blocks[number] = BlockWeights(
                norm=self.empty(2 * hidden),
                attention=self._attention(2 * hidden),
                mlp_norm=self.empty(hidden),
                mlp=self._mlp(config.intermediate_size, config.mlp_bias),
            )
        queries, kv = config.query_rows, config.kv_heads * config.head_dim
        changed = [(0, queries), (queries, kv), (queries + kv, kv)] if shared.adapted_attention else []
        return SharedBlockWeights(
            use=shared.uses.index(index),
            block=self._blocks[number],
            qkv_changes=tuple(self._low_rank(shared.rank, *each, 2 * hidden) for each in changed),
            gate_up_change=self._low_rank(
                shared.rank, 0, self._gate_up_rows(config.intermediate_size), hidden
            ),
            out=self.matrix(hidden, hidden),
        )

    def _low_rank(self, rank: int, first: int, rows: int, columns: int) -> LowRank:
        return LowRank(first, self.matrix(rank, columns), self.matrix(rows, rank))

    def _attention(self, width: int) -> AttentionWeights:
        """Return the weights of attention whose input is ``width`` wide."""
        config, hidden = self._config, self._config.hidden_size
        rows = config.query_rows + 2 * config.kv_heads * config.head_dim
        return AttentionWeights(
            qkv=self.matrix(rows, width),
            qkv_bias=self.empty(rows) if config.qkv_bias else None,
            q_norm=self._head_norm(config.heads),
            k_norm=self._head_norm(config.kv_heads),
            o=self.matrix(hidden, config.heads * config.head_dim),
            o_bias=self.empty(hidden) if config.o_bias else None,
            sinks=self.empty(config.heads) if config.sinks else None,
        )

    def _cross(self) -> CrossWeights:
        config, hidden, width = self._config, self._config.hidden_size, self._config.head_dim
        return CrossWeights(
            q=self.matrix(config.heads * width, hidden),
            kv=self.matrix(2 * config.kv_heads * width, hidden),
            q_norm=self.empty(width),
            k_norm=self.empty(width),
            o=self.matrix(hidden, config.heads * width),
            gate=self.empty(1),
            mlp_gate=self.empty(1),
        )

    def _head_norm(self, heads: int) -> torch.Tensor | None:
        config = self._config
        shapes = {
            "head": (config.head_dim,),
            "each": (heads, config.head_dim),
            "all": (heads * config.head_dim,),
        }
        return self.empty(*shapes[config.qk_norm_over]) if config.qk_norm else None

    def _latent(self, latent: LatentConfig) -> LatentWeights:
        heads, hidden, rank = self._config.heads, self._config.hidden_size, latent.query_rank
        return LatentWeights(
            q_down=self.matrix(rank, hidden) if rank else None,
            q_norm=self.empty(rank) if rank else None,
            q=self.matrix(heads * (latent.nope_dim + latent.rope_dim), rank or hidden),
            kv_down=self.matrix(latent.width, hidden),
            kv_norm=self.empty(latent.rank),
            kv_up=self.empty(heads, latent.nope_dim + latent.value_dim, latent.rank),
            o=self.matrix(hidden, heads * latent.value_dim),
        )

    def _delta(self, delta: DeltaConfig) -> DeltaWeights:
        hidden, values = self._config.hidden_size, delta.value_heads * delta.value_dim
        return DeltaWeights(
            qkvz=self.matrix(delta.channels + values, hidden),
            ba=self.matrix(2 * delta.value_heads, hidden),
            conv=self.empty(delta.channels, 1, delta.conv_width),
            dt_bias=self.empty(delta.value_heads),
            a_log=self.empty(delta.value_heads),
            norm=self.empty(delta.value_dim),
            o=self.matrix(hidden, values),
        )

    def _mamba2(self, mamba: Mamba2Config) -> Mamba2Weights:
        hidden, rows = self._config.hidden_size, mamba.width + mamba.channels + mamba.heads
        return Mamba2Weights(
            projection=self.matrix(rows, hidden),
            projection_bias=self.empty(rows) if mamba.biased else None,
            conv=self.empty(mamba.channels, 1, mamba.conv_width),
            conv_bias=self.empty(mamba.channels) if mamba.conv_bias else None,
            dt_bias=self.empty(mamba.heads),
            a_log=self.empty(mamba.heads),
            skip=self.empty(mamba.heads),
            norm=self.empty(mamba.width) if mamba.norm else None,
            o=self.matrix(hidden, mamba.width),
            o_bias=self.empty(hidden) if mamba.biased else None,
        )

    def _mamba1(self, mamba: Mamba1Config) -> Mamba1Weights:
        hidden, width = self._config.hidden_size, mamba.width
        return Mamba1Weights(
            projection=self.matrix(2 * width, hidden),
            projection_bias=self.empty(2 * width) if mamba.biased else None,
            conv=self.empty(width, 1, mamba.conv_width),
            conv_bias=self.empty(width) if mamba.conv_bias else None,
            selection=self.matrix(mamba.rank + 2 * mamba.state_dim, width),
            steps=self.matrix(width, mamba.rank),
            step_bias=self.empty(width),
            a_log=self.empty(width, mamba.state_dim),
            skip=self.empty(width),
            step_norm=self.empty(mamba.rank) if mamba.trained_norms else None,
            key_norm=self.empty(mamba.state_dim) if mamba.trained_norms else None,
            query_norm=self.empty(mamba.state_dim) if mamba.trained_norms else None,
            o=self.matrix(hidden, width),
            o_bias=self.empty(hidden) if mamba.biased else None,
        )

    def _short_conv(self, conv: ShortConvConfig) -> ShortConvWeights:
        hidden, biased = self._config.hidden_size, conv.biased
        return ShortConvWeights(
            projection=self.matrix(3 * conv.width, hidden),
            projection_bias=self.empty(3 * conv.width) if biased else None,
            conv=self.empty(conv.width, 1, conv.conv_width),
            conv_bias=self.empty(conv.width) if biased else None,
            o=self.matrix(hidden, conv.width),
            o_bias=self.empty(hidden) if biased else None,
        )

    def _gate_up_rows(self, width: int) -> int:
        return 2 * width if self._config.gated_mlps else width

    def _mlp(self, width: int, biased: bool) -> MLPWeights:
        hidden, rows = self._config.hidden_size, self._gate_up_rows(width)
        return MLPWeights(
            gate_up=self.matrix(rows, hidden),
            gate_up_bias=self.empty(rows) if biased else None,
            down=self.matrix(hidden, width),
            down_bias=self.empty(hidden) if biased else None,
            xielu=self.empty(4) if self._config.activation == "xielu" else None,
        )

    def _experts(self, experts: ExpertsConfig) -> ExpertsWeights:
        hidden, count, width = self._config.hidden_size, experts.count, experts.width
        rows = self._gate_up_rows(width)
        correction = torch.empty(count, dtype=torch.float32, device=self._device)
        return ExpertsWeights(
            router=self.empty(count, hidden),
            router_bias=self.empty(count) if experts.biased else None,
            correction=correction if experts.correction else None,
            gate_up=self.matrix(count, rows, hidden),
            gate_up_bias=self.empty(count, rows) if experts.biased else None,
            down=self.matrix(count, hidden, width),
            down_bias=self.empty(count, hidden) if experts.biased else None,
            shared=self._mlp(experts.shared_width, biased=False) if experts.shared_width else None,
            shared_gate=self.empty(1, hidden) if experts.shared_gate else None,
        )
