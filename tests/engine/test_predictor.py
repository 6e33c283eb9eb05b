"""``--draft mtp``: the layer of a DeepSeek V3 or Qwen3-Next checkpoint that predicts further tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.engine.grouped import CHUNK, GroupedEngines, forget
from tests.engine.test_drafting import prompts
from tests.engine.test_oracle import finish
from tests.tiny_models import VOCAB, reference_model, train_tokenizer
from tierstore.errors import UsageError
from tierstore.tiers.hbm import COMPLETED
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model, pools_of_one_sequence
from tierstore_engine.layer_weights import ExpertsWeights
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.model import Model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step

TOKENS = 75
# Few tokens are likely, so that some drafts are right.
BIASED = SamplingParams(
    max_new_tokens=40,
    temperature=1.0,
    seed=5,
    ignore_eos=True,
    logit_bias=dict.fromkeys((65, 66, 67, 68), 50.0),
)
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)


NAMES = {
    "deepseek-v3": "model.layers.3. enorm hnorm eh_proj shared_head.norm",
    "qwen3-next": "mtp. pre_fc_norm_embedding pre_fc_norm_hidden fc norm",
}
"""The prefix of a predictor's tensors in a checkpoint, and its norms of an embedding and of an output, the
matrix behind them, and its last norm."""
BLOCKS = {"deepseek-v3": "model.layers.3.", "qwen3-next": "mtp.layers.0."}
COPIED = 1  # the layer whose weights are also those of the predictor's block


@dataclass(frozen=True)
class Reference:
    """A checkpoint, and the same weights in torch: a model of transformers, and the parts of its
    predictor."""

    folder: Path
    model: nn.Module
    embed_norm: torch.Tensor
    hidden_norm: torch.Tensor
    merge: torch.Tensor
    norm: torch.Tensor

    @torch.inference_mode()
    def predict(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the predictor and its logits, for each of ``tokens`` but the first.

        Section 2.2 of the technical report (arXiv:2412.19437), for a depth of 1: the RMS norms of the
        embedding of tᵢ₊₁ and of the representation hᵢ are concatenated and projected by M₁. A transformer
        block follows, and the shared head predicts tᵢ₊₂. As in the released weights, the embedding is the
        first half of the concatenation, hᵢ is the output of the model's final norm, and the predictor has a
        norm before the head.
        """
        decoder, ids = self.model.model, torch.tensor([tokens])
        hidden, embedded = decoder(ids).last_hidden_state[0], decoder.embed_tokens(ids)[0]
        parts = _norm(embedded[1:], self.embed_norm), _norm(hidden[:-1], self.hidden_norm)
        merged = (torch.cat(parts, dim=-1) @ self.merge.T)[None]
        count = merged.shape[1]
        places = torch.arange(count)[None]
        out = decoder.layers[COPIED](
            merged,
            attention_mask=torch.full((count, count), -torch.inf).triu(1)[None, None],
            position_ids=places,
            position_embeddings=decoder.rotary_emb(merged, places),
        )
        normed = _norm((out[0] if isinstance(out, tuple) else out)[0], self.norm)
        return normed, self.model.lm_head(normed)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Makes a tiny checkpoint with a predictor, once."""

    @cache
    def make(name: str) -> Reference:
        model, folder = reference_model(name), tmp_path_factory.mktemp(f"mtp-{name}")
        model.save_pretrained(folder)
        train_tokenizer().save(str(folder / "tokenizer.json"))
        draw, hidden = torch.Generator().manual_seed(3), model.config.hidden_size
        norms = [torch.randn(hidden, generator=draw) * 0.1 + 1 for _ in range(3)]
        merge = torch.randn(hidden, 2 * hidden, generator=draw) * hidden**-0.5
        tensors = load_file(folder / "model.safetensors")
        prefix, *parts = NAMES[name].split()
        centre = float(name == "qwen3-next")  # its norms add 1 to their weights
        stored = (norms[0] - centre, norms[1] - centre, merge, norms[2] - centre)
        own = {f"{prefix}{part}.weight": each for part, each in zip(parts, stored, strict=True)}
        block = f"model.layers.{COPIED}."
        own |= {
            BLOCKS[name] + key.removeprefix(block): tensor.clone()
            for key, tensor in tensors.items()
            if key.startswith(block)
        }
        if name == "deepseek-v3":  # released checkpoints have the shared tensors a second time
            for part, shared in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
                own[f"{prefix}{part}.weight"] = tensors[f"{shared}.weight"].clone()
        save_file(tensors | own, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        return Reference(folder, model, norms[0], norms[1], merge, norms[2])

    return make


@pytest.fixture
def name() -> str:
    return "deepseek-v3"


@pytest.fixture
def reference(name: str, references: Callable[[str], Reference]) -> Reference:
    return references(name)


@pytest.fixture
def model(reference: Reference) -> LoadedModel:
    return load_model(str(reference.folder), device="cpu", predictor=True)


@pytest.fixture
def plain(reference: Reference) -> LoadedModel:
    """The same model without its predictor."""
    return load_model(str(reference.folder), device="cpu")


def steps(tokens: int) -> list[range]:
    """Return some spans that follow one another."""
    ends = [0, 1, 20, 21, 22, 64, tokens]
    return [range(start, stop) for start, stop in pairwise(ends)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_the_layer_computes_what_the_report_says(reference: Reference, options: dict[str, bool]) -> None:
    """In steps of several lengths, and each token again as the first of a draft."""
    model = load_model(str(reference.folder), device="cpu", predictor=True, **options)
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    hidden, logits = reference.predict(tokens)
    pools = pools_of_one_sequence(model, TOKENS)
    runner = make_runner(model, pools, EngineSettings())
    assert isinstance(runner, Model)
    earlier = torch.zeros(1, model.config.hidden_size)

    def step(span: range) -> Step:
        places = Span(tuple(range(pool.num_pages) for pool in pools), span.start, span.stop)
        return Step((places,), tokens[span.start : span.stop], range(len(span)), COMPLETED, 64)

    for span in steps(TOKENS):
        runner.compute(step(span))
        assert runner.outputs is not None
        before = torch.cat((earlier, runner.outputs[:-1]))
        earlier = runner.outputs[-1:]
        runner.remember(step(span), before)
        for some, rows in [
            (span, before),
            *((range(at, at + 1), before[at - span.start, None]) for at in span),
        ]:
            outputs, found = runner.predict(step(some), rows)
            skip = some.start == 0  # token 0 has no output before it
            expected = slice(some.start + skip - 1, some.stop - 1)
            assert torch.allclose(found[skip:], logits[expected], atol=1e-4)
            assert torch.allclose(outputs[skip:], hidden[expected], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kv", "params"),
    [
        ("deepseek-v3", "auto", GREEDY),
        ("deepseek-v3", "int8", BIASED),
        ("qwen3-next", "auto", BIASED),
        ("qwen3-next", "k8v4", GREEDY),
    ],
)
def test_tokens_are_those_without_drafts(
    kv: str,
    params: SamplingParams,
    reference: Reference,
    grouped: GroupedEngines,
) -> None:
    """Several prompts and their forks, with too little room for all."""
    asked = [prompt * 3 for prompt in prompts(5)]
    made = [
        load_model(str(reference.folder), device="cpu", kv_dtype=kv, predictor=drafts)
        for drafts in (False, True)
    ]
    one = grouped.make(made[0], stored=False)
    other = grouped.make(made[1], pages=14)
    found = []
    for engine in (one, other):
        ids = [engine.add(prompt, params) for prompt in asked]
        ids += [engine.fork(ids[0], seed=seed) for seed in (8, 9)]
        done = finish(engine)
        found.append([done[number].tokens for number in ids])
    assert found[0] == found[1]
    stats = other.stats()
    assert stats.preemptions
    assert stats.drafted_tokens > 60
    assert (stats.accepted_tokens > 20) == (params is BIASED)


def test_a_layer_that_knows_the_next_token_is_always_right(
    model: LoadedModel, grouped: GroupedEngines
) -> None:
    """The next token depends on the last one alone, and so does what the layer predicts. Every draft is
    accepted, also its last token."""
    weights, hidden = model.weights, model.config.hidden_size
    layers = []
    for layer in weights.layers:
        mlp = replace(layer.mlp, down=torch.zeros_like(layer.mlp.down))
        if isinstance(mlp, ExpertsWeights):
            mlp = replace(mlp, shared=replace(mlp.shared, down=torch.zeros_like(mlp.shared.down)))
        mixer = replace(layer.mixer, o=torch.zeros_like(layer.mixer.o))
        layers.append(replace(layer, mixer=mixer, mlp=mlp))
    predictor = replace(
        weights.predictor,
        embed_norm=torch.ones(hidden),
        merge=torch.eye(hidden, 2 * hidden),
        norm=weights.norm,
    )
    weights = replace(weights, layers=tuple(layers), predictor=predictor)
    engine = grouped.make(replace(model, weights=weights, digest="knowing"))
    [found] = engine.generate([[7, 3, 200]], GREEDY)
    assert found.metrics.accepted_tokens == found.metrics.drafted_tokens >= 28
    assert engine.stats().steps <= 12


@pytest.mark.parametrize("tier", ["hbm", "host", "disk"])
@pytest.mark.parametrize("shared", [64, 70])
def test_hits_bring_what_the_layer_remembers(
    tier: str, shared: int, reference: Reference, grouped: GroupedEngines
) -> None:
    """After a hit that ends at a page's end or inside a page, all pages have the bytes of a cold run, and the
    same drafts are made."""
    model = load_model(str(reference.folder), device="cpu", predictor=True, deterministic=True)
    chance = torch.Generator().manual_seed(1)
    known = torch.randint(VOCAB, (shared,), generator=chance).tolist()
    prompt = [*known, *torch.randint(VOCAB, (30,), generator=chance).tolist()]
    engine = grouped.make(model, disk="store")
    once = replace(GREEDY, max_new_tokens=1)
    engine.generate([known], once)
    stored_at = engine.generate([[*known, 3]], once)[0].metrics.reused_tokens
    assert stored_at == shared
    if tier != "hbm":
        forget(engine)
    if tier == "disk":
        grouped.close(engine)
        engine = grouped.make(model, disk="store")
    cold = grouped.make(model, stored=False)
    contents, counts = [], []
    for each in (cold, engine):
        request = each.add(prompt, BIASED)
        sequence = each._roster.get(request)
        assert sequence is not None
        while sequence.computed < len(prompt) + 2 * CHUNK:
            each.step()
        whole = sequence.computed // CHUNK
        contents.append(each.connector.pool.array[sequence.tables[0].pages[:whole]][: shared // CHUNK + 2])
        done = finish(each)[request]
        counts.append((done.metrics.drafted_tokens, done.metrics.accepted_tokens, done.tokens))
    assert done.metrics.reused_by_tier.get(tier)
    assert (contents[0] == contents[1]).all()
    assert counts[0] == counts[1]


def test_the_page_of_a_hits_end_is_not_the_caches(model: LoadedModel, grouped: GroupedEngines) -> None:
    """Its last token is computed again, so each sequence has a page of its own there."""
    engine, known = grouped.make(model), list(range(4 * CHUNK))
    engine.generate([known], GREEDY)
    ids = [engine.add([*known, last], GREEDY) for last in (7, 8)]
    while any(engine.computed_tokens(number) <= len(known) for number in ids):
        engine.step()
    one, other = (engine._roster.get(number).tables[0].pages for number in ids)
    assert one[:3] == other[:3]
    assert one[3] != other[3]


def test_identities_differ(model: LoadedModel, plain: LoadedModel) -> None:
    """Pages with and without the layer have different sizes."""
    one, other = (each.kv_spec(chunk_tokens=CHUNK) for each in (model, plain))
    assert model.identity(one).digest != plain.identity(other).digest
    assert one.page_bytes > other.page_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"model": "tiny"},
            "--draft mtp is for DeepSeek V3 and Qwen3-Next, and this model has no layer for it: give",
        ),
        ({"device": "cuda"}, "--draft mtp is computed on the CPU only: give --device cpu"),
    ],
)
def test_refusals(
    options: dict[str, str], words: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore_engine.build.check_device", lambda device: None)
    with pytest.raises(UsageError, match=words):
        open_model(**{"model": str(reference.folder), "device": "cpu", "predictor": True, **options})


@pytest.mark.parametrize(
    ("name", "tensor"), [("deepseek-v3", "model.layers.3.eh_proj"), ("qwen3-next", "mtp.fc")]
)
def test_a_checkpoint_without_the_layer(name: str, tensor: str, checkpoints: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=f"this model has no {re.escape(tensor)}.weight: give another"):
        open_model(str(checkpoints(name)), device="cpu", predictor=True)
