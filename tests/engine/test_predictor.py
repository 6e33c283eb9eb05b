"""``--draft mtp``: the layer of a DeepSeek V3 checkpoint that predicts further tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import LoadedModel, load_model, make_runner, open_model
from tierstore_engine.model import Model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step

LAYERS = 2  # of the model; the layer after them drafts
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


@dataclass(frozen=True)
class Reference:
    """A checkpoint, and the same weights in torch: a model of transformers, and the parts of its predictor.
    ``predictor`` has the tensors of a checkpoint by their names behind the layer's number."""

    folder: Path
    model: nn.Module
    block: nn.Module
    predictor: dict[str, torch.Tensor]

    @torch.inference_mode()
    def predict(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the predictor, before its last norm, and its logits, for each of ``tokens``
        but the first.

        Section 2.2 of the technical report (arXiv:2412.19437), for a depth of 1: the RMS norms of the
        embedding of tᵢ₊₁ and of the representation hᵢ are concatenated and projected by M₁. A transformer
        block follows, and the shared head predicts tᵢ₊₂. The order of the two in M₁ is that of the released
        weights, which call the matrix ``eh_proj``. Like there, hᵢ is the output of the model's final norm.
        """
        ids, own = torch.tensor([tokens]), self.predictor
        hidden = self.model.model(ids).last_hidden_state[0]
        embedded = self.model.model.embed_tokens(ids)[0]
        merged = torch.cat(
            (_norm(embedded[1:], own["enorm.weight"]), _norm(hidden[:-1], own["hnorm.weight"])), dim=-1
        )
        given = merged @ own["eh_proj.weight"].T
        count = len(given)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        places = torch.arange(count)[None]
        rotations = self.model.model.rotary_emb(given[None], places)
        out = self.block(given[None], attention_mask=mask, position_ids=places, position_embeddings=rotations)
        out = out[0] if isinstance(out, tuple) else out
        normed = _norm(out[0], own["shared_head.norm.weight"])
        return out[0], self.model.lm_head(normed)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny DeepSeek V3 whose last layer became the block of a predictor."""
    model = reference_model.__wrapped__("deepseek-v3")
    folder = tmp_path_factory.mktemp("mtp")
    model.save_pretrained(folder)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    draw = torch.Generator().manual_seed(3)
    hidden = model.config.hidden_size

    def near_one() -> torch.Tensor:
        return torch.randn(hidden, generator=draw) * 0.1 + 1

    predictor = {
        "enorm.weight": near_one(),
        "hnorm.weight": near_one(),
        "eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=draw) * hidden**-0.5,
        "shared_head.norm.weight": near_one(),
    }
    tensors = load_file(folder / "model.safetensors")
    # Released checkpoints have the shared tensors a second time.
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    again = {f"{name}.weight": tensors[f"{shared}.weight"].clone() for name, shared in copies.items()}
    tensors |= {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in (predictor | again).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    block = model.model.layers[LAYERS]
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return Reference(folder, model, block, predictor)


@pytest.fixture(scope="module")
def model(reference: Reference) -> LoadedModel:
    return load_model(str(reference.folder), device="cpu", predictor=True)


@pytest.fixture(scope="module")
def plain(reference: Reference) -> LoadedModel:
    """The same model without its predictor."""
    return load_model(str(reference.folder), device="cpu")


def steps(tokens: int) -> list[range]:
    """Return some spans that follow one another."""
    ends = [0, 1, 20, 21, 22, 64, tokens]
    return [range(start, stop) for start, stop in pairwise(ends)]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_the_layer_computes_what_the_report_says(reference: Reference, options: dict[str, bool]) -> None:
    """In steps of several lengths, and each token again as the first of a draft."""
    model = load_model(str(reference.folder), device="cpu", predictor=True, **options)
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    hidden, logits = reference.predict(tokens)
    pool = PagePool(model.kv_spec(chunk_tokens=CHUNK), -(-TOKENS // CHUNK))
    runner = make_runner(model, [pool], EngineSettings())
    assert isinstance(runner, Model)
    earlier = torch.zeros(1, model.config.hidden_size)
    norm = reference.predictor["shared_head.norm.weight"]

    def step(span: range) -> Step:
        places = Span((range(pool.num_pages),), span.start, span.stop)
        return Step((places,), tokens[span.start : span.stop], range(len(span)), COMPLETED, CHUNK)

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
            assert torch.allclose(outputs[skip:], _norm(hidden[expected], norm), atol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, BIASED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
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
    assert stats.drafted_tokens > 100
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
        if layer is not weights.layers[0]:
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
            r"needs a DeepSeek V3 checkpoint .*, and this model has no model\.layers\.2\.eh_proj",
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


def test_a_checkpoint_without_the_layer(checkpoints: Callable[..., Path]) -> None:
    with pytest.raises(
        UsageError, match=r"this model has no model\.layers\.3\.eh_proj\.weight: give --draft"
    ):
        open_model(str(checkpoints("deepseek-v3")), device="cpu", predictor=True)
