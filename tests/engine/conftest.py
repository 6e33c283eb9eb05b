"""Tiny Hugging Face checkpoints with random weights, and what transformers computes with them."""

from __future__ import annotations

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
from tierstore.store import Store
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine import cli
from tierstore_engine.attention.base import make_attention
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

# These models are so small that a second thread only costs, and on a busy machine it costs a great deal.
torch.set_num_threads(1)

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
}


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
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                out = model(ids, past_key_values=past, use_cache=True)
                past = out.past_key_values
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


@dataclass
class Stored:
    """An engine and the store below it."""

    engine: Engine
    store: Store
    closed: bool = False

    def close(self) -> None:
        """Close both, after seeing that every page is where it belongs."""
        if not self.closed and not self.engine.has_work:
            assert self.store.flush(30)
            self.store.check()
            assert self.engine.connector.available() == self.engine.connector.pool.num_pages
        self.closed = True
        self.engine.close()


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
            path, spec, identity=model.identity(spec), pool=pool, host_bytes=host_bytes, disk_bytes=16 << 20
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
    family, fields = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**_BASE, **fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(11)
    for parameter, tensor in model.named_parameters():
        # Away from transformers' tiny default weights, with which attention does next to nothing.
        small = "norm" in parameter or "bias" in parameter
        deviation = 0.1 if small else 1.5 * tensor.shape[-1] ** -0.5
        torch.nn.init.normal_(tensor, float("norm" in parameter), deviation, generator=generator)
    return model
