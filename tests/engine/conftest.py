"""Tiny Hugging Face checkpoints with random weights, and what transformers computes with them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import tierstore
from tests.engine.stored import Stored
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine import cli
from tierstore_engine.attention import make_attention
from tierstore_engine.build import LoadedModel, load_model
from tierstore_engine.drafting import Drafter
from tierstore_engine.engine import Engine
from tierstore_engine.model import Model
from tierstore_engine.settings import EngineSettings

if TYPE_CHECKING:
    import transformers

# The first call of anything in torch takes longer than a test case usually may.
hypothesis.settings.register_profile("engine", deadline=None)
hypothesis.settings.load_profile("engine")

VOCAB = 320
PROMPT_TOKENS = 333
NEW_TOKENS = 64
STORED_CHUNK = 16  # tokens a page of a stored engine

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}

ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"num_key_value_heads": 2, "rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-mqa-biased": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": None}),
    "mistral-windowed": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 37}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-windowed": (
        "Qwen2",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 70,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "qwen3-yarn": (
        "Qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_LATENTS,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_LATENTS,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}
"""Models of one layer group."""

GROUPED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 37,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 37,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 37,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "truncate": False,
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 48,
            "floor_scale": 32,
            "attn_scale": 0.3,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 24,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_head": 16,
            "mamba_chunk_size": 32,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "linear_attention", "moe", "full_attention", "mlp"],
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 12,
            "n_groups": 3,
            "chunk_size": 32,
            "time_step_min": 1e-9,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
}
"""Models whose layers remember the past in several ways."""

_FULL = ["full_attention"] * 3

VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            **GROUPED["granite-hybrid"][1],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": (0.4, 1.2),
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h-dense": (
        "NemotronH",
        {
            **GROUPED["nemotron-h"][1],
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "time_step_min": 0.4,
        },
    ),
}
"""Of which transformers computes other logits with a cache: there it does not limit the steps of Mamba-2."""


_LAYERS = {"num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 37}

LLAMA_LIKE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {"num_key_value_heads": 2, "mlp_bias": True}),
    "cohere": ("Cohere", {"num_key_value_heads": 2, "logit_scale": 0.7}),
    "cohere-qk-norm": ("Cohere", {"num_key_value_heads": 2, "use_qk_norm": True, "logit_scale": 0.7}),
    "cohere2": ("Cohere2", {**_LAYERS, "sliding_window_pattern": 2, "logit_scale": 0.7}),
    "ernie": ("Ernie4_5", {"num_key_value_heads": 2, "head_dim": 16, "use_bias": True}),
    "exaone4": ("Exaone4", {**_LAYERS, "sliding_window_pattern": 2}),
    "exaone4-full": ("Exaone4", {"num_key_value_heads": 2, "sliding_window": None, "layer_types": _FULL}),
    "falcon": ("Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}),
    "falcon-7b": ("Falcon", {"multi_query": True}),
    "falcon-rw": ("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-sequential": ("GPTNeoX", {"use_parallel_residual": False}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "glm": ("Glm", {"num_key_value_heads": 2, "head_dim": 16}),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 16}),
    "granite": (
        "Granite",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
    "ministral": (
        "Ministral",
        {**_LAYERS, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "nemotron": ("Nemotron", {"num_key_value_heads": 2, "mlp_bias": True}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": ("Olmo3", {**_LAYERS, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 70}),
    "phi4-mini": (
        "Phi3",
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
            },
        },
    ),
    "seed-oss": ("SeedOss", {"num_key_value_heads": 2, "head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "num_key_value_heads": 2}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"num_key_value_heads": 2, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 37}),
}
"""Architectures that are Llama with a few changes."""


@dataclass(frozen=True)
class Oracle:
    """A checkpoint folder and the greedy continuation of ``prompt`` by transformers, with its logits."""

    folder: Path
    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the checkpoint folder of an architecture in ``ARCHITECTURES``, once."""

    @cache
    def make(name: str, *, sharded: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(name)
        reference_model(name).save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
        train_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="session")
def oracles(checkpoints: Callable[..., Path]) -> Callable[[str], Oracle]:
    """Computes an architecture's :class:`Oracle`, once."""

    @cache
    def make(name: str) -> Oracle:
        model = reference_model(name)
        generator = torch.Generator().manual_seed(7)
        prompt = torch.randint(VOCAB, (PROMPT_TOKENS,), generator=generator).tolist()
        rows, tokens, past = [], [], None
        names = inspect.signature(model.forward).parameters  # another one from transformers 5.24 on
        name_of_past = "cache" if "cache" in names else "past_key_values"
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                out = model(ids, use_cache=True, **{name_of_past: past})
                past = out[name_of_past]
                rows.append(out.logits[0, -1].float())
                tokens.append(int(rows[-1].argmax()))
                ids = torch.tensor([[tokens[-1]]])
        return Oracle(checkpoints(name), prompt, tokens, torch.stack(rows))

    return make


@pytest.fixture(scope="session")
def loaded() -> Callable[..., LoadedModel]:
    """Loads a model on the CPU, wherever the tests run, once."""
    return cache(partial(load_model, device="cpu"))


@pytest.fixture(scope="session")
def tiny(loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded("tiny")


@pytest.fixture
def engine_of() -> Callable[..., Engine]:
    """Makes an engine without a store; when the test is over, none of its pages may be missing."""
    engines: list[Engine] = []

    def make(
        model: LoadedModel,
        *,
        pool_pages: int = 64,
        chunk_tokens: int = 16,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> Engine:
        spec = model.kv_spec(chunk_tokens=chunk_tokens)
        connector = NoStore(PagePool(spec, pool_pages), model.identity(spec))
        settings.setdefault("prefill_chunk", 128)
        runnable = Model(
            model.config, model.weights, [make_attention(connector.pool, model.config)], device="cpu"
        )
        engines.append(
            Engine(runnable, model.tokenizer, connector, EngineSettings(**settings), drafter=drafter)
        )
        return engines[-1]

    yield make
    for engine in engines:
        if not engine.has_work:
            assert engine.connector.available() == engine.connector.pool.num_pages
        engine.close()
        assert engine.connector.available() == engine.connector.pool.num_pages


@pytest.fixture
def stored_engine(tmp_path: Path) -> Iterator[Callable[..., Stored]]:
    """Makes an engine over a store; ``disk`` names its directory. Everything is checked when it is closed."""
    opened: list[Stored] = []

    def make(
        model: LoadedModel,
        *,
        disk: str | None = None,
        pool_pages: int = 64,
        host_bytes: int = 16 << 20,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> Stored:
        spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
        pool = PagePool(spec, pool_pages)
        path = None if disk is None else tmp_path / disk
        store = tierstore.open(
            path, spec, identity=model.identity(spec), pools=pool, host_bytes=host_bytes, disk_bytes=16 << 20
        )
        attention = make_attention(pool, model.config)
        runnable = Model(model.config, model.weights, [attention], device="cpu")
        settings.setdefault("prefill_chunk", 64)
        settings.setdefault("plan", "load")  # these models compute faster than some disks load
        engine = Engine(
            runnable, model.tokenizer, StoreConnector(store), EngineSettings(**settings), drafter=drafter
        )
        opened.append(Stored(engine, store))
        return opened[-1]

    yield make
    for stored in opened:
        stored.close()


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``tierstore-engine`` in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tierstore-engine", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@cache
def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of ``VOCAB`` entries, 0 and 1 being special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog lay on the log"] * 4, trainer)
    return tokenizer


def rewrite_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: field for name, field in value.items() if field is not None}))


@cache
def reference_model(name: str) -> transformers.PreTrainedModel:
    import transformers  # seconds, and not everywhere where the kernels are tested

    transformers.utils.logging.disable_progress_bar()
    family, fields = {**ARCHITECTURES, **GROUPED, **VARIANTS, **LLAMA_LIKE}[name]
    text = "Text" if family in ("Gemma3", "Llama4") else ""  # the others of that name take images
    config = getattr(transformers, f"{family}{text}Config")(**(_BASE | fields))
    config._attn_implementation = "eager"  # the only one that knows caps and sinks
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(11)
    centred = family in ("Gemma", "Gemma2", "Gemma3", "Nemotron", "Qwen3Next")
    for parameter, tensor in (*model.named_parameters(), *_corrections(model)):
        # Away from transformers' tiny default weights, with which attention does next to nothing.
        small = "norm" in parameter or "bias" in parameter
        deviation = 0.1 if small else 1.5 * tensor.shape[-1] ** -0.5
        mean = float("norm" in parameter and (not centred or "linear_attn" in parameter))
        if parameter.endswith("A_log"):  # a state that forgets within a hundred tokens, about
            mean, deviation = -4.0, 1.0
        torch.nn.init.normal_(tensor, mean, deviation, generator=generator)
    return model


def _corrections(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What DeepSeek V3's routers add for choosing: no parameters, and kept all the same."""
    return [(name, each) for name, each in model.named_buffers() if "correction_bias" in name]
