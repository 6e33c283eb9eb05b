"""Images in prompts: logits against transformers, and the reuse of KV and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.engine.pictured import CHUNK, FAMILIES, Pictured, picture, pictured, reference, write_folder
from tests.tiny_models import rewrite_json
from tierstore.errors import UsageError
from tierstore.sizing import embedding_worth
from tierstore.spec import worth_of
from tierstore.testing.processes import DaemonProcess
from tierstore.tiers.disk.listing import list_store
from tierstore.tiers.overflow import Overflow, OverflowPool
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import _check_gpu, load_model, open_model
from tierstore_engine.errors import ModelError, RequestError
from tierstore_engine.images import PromptImage, PromptImages
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.tables import CrossTable

TEXT = "the cat sat on the mat and the dog lay on the log "
ALL = [TEXT, picture(1), TEXT, picture(2, 60, 120), "and what is it?"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_folder(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def models(folders: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    return cache(lambda name: load_model(str(folders(name)), device="cpu"))


class Engines:
    """Starts engines and ends them, in which no page may be missing then."""

    def __init__(self, models: Callable[[str], LoadedModel]) -> None:
        self._models = models
        self._started: list[Pictured] = []

    def start(self, name: str, model: LoadedModel | None = None, **arguments: Any) -> Pictured:
        self._started.append(pictured(name, model or self._models(name), **arguments))
        return self._started[-1]

    def end(self, each: Pictured) -> None:
        self._started.remove(each)
        settle(each)
        connector = each.engine.connector
        for group, pool in enumerate(connector.pools):
            assert connector.available(group=group) == pool.capacity
        each.engine.close()

    def end_all(self) -> None:
        for each in list(self._started):
            self.end(each)


@pytest.fixture
def engines(models: Callable[[str], LoadedModel]) -> Iterator[Engines]:
    engines = Engines(models)
    yield engines
    engines.end_all()


def settle(each: Pictured) -> None:
    """Wait until everything that was saved is where it belongs."""
    connector = each.engine.connector
    if isinstance(connector, StoreConnector):
        for store in (connector.store, *connector._beside):
            assert store.flush(60)


# -- logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_from_every_tier(
    name: str, engines: Engines, tmp_path: Path
) -> None:
    engine = engines.start(name, store=str(tmp_path))
    for parts in (["no image"], [picture(3), "what?"], ALL):
        engine.check(parts, engine.answer(parts))
    least = len(engine.tokens(ALL)[0]) - 1 - CHUNK
    warm = engine.answer(ALL)
    assert warm.metrics.reused_by_tier["hbm"] >= least
    engine.check(ALL, warm)
    settle(engine)
    engine.engine._keeper.evict_idle()
    from_host = engine.answer(ALL)
    assert from_host.metrics.reused_by_tier["host"] >= least
    engine.check(ALL, from_host)
    assert engine.vision.encoded == 3
    engines.end(engine)
    layouts = [holding.identity.layout for holding in list_store(tmp_path).holdings]
    assert max(map(worth_of, layouts)) == embedding_worth(reference(name).config.to_dict())
    again = engines.start(name, store=str(tmp_path))
    from_disk = again.answer(ALL)
    assert from_disk.metrics.reused_by_tier["disk"] >= least
    again.check(ALL, from_disk)
    assert (again.vision.encoded, again.vision.found) == (0, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_engines_share_images_through_a_daemon(
    name: str, engines: Engines, shared_daemon: DaemonProcess
) -> None:
    one, other = (engines.start(name, store=shared_daemon.url) for _ in range(2))
    one.check(ALL, one.answer(ALL))
    settle(one)
    found = other.answer(ALL)
    other.check(ALL, found)
    assert found.metrics.reused_tokens >= len(other.tokens(ALL)[0]) - 1 - CHUNK
    assert (other.vision.encoded, other.vision.found) == (0, 2)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("reuses", [True, False])
def test_a_preempted_request_has_its_images_again(name: str, reuses: bool, engines: Engines) -> None:
    engine = engines.start(name, prefix_cache=reuses)
    prompt = len(engine.tokens(ALL)[0])
    for at in (prompt // 2, prompt + 2):  # while its prompt is computed, and while it answers
        request = engine.add(ALL)
        while engine.engine.computed_tokens(request) < at:
            engine.engine.step()
        engine.engine._scheduler._park()
        if at > prompt:
            engine.engine._keeper.evict_idle()
        [found] = engine.run(request)
        assert found.metrics.preemptions == 1
        engine.check(ALL, found)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hit_may_end_anywhere(name: str, engines: Engines) -> None:
    """Pages leave from a prompt's end, so hits of every length follow, also such that end inside an image."""
    parts, lengths = [TEXT, picture(1, 168, 168), TEXT * 4 if name == "mllama" else "and?"], set[int]()
    engine = engines.start(name, pool_pages=24, settings={"prefill_chunk": 16 if name == "qwen" else 48})
    pages = len(engine.tokens(parts)[0]) // CHUNK
    for gone in range(pages + 1):
        engine.answer(parts, new=1)
        engine.engine.connector.evict(gone + 1)
        found = engine.answer(parts, new=2)
        engine.check(parts, found)
        lengths.add(found.metrics.reused_tokens)
    [start] = engine.places(parts)
    assert any(start < length < start + 36 for length in lengths), lengths
    assert len(lengths) > (pages // 2 if name == "qwen" else 1), lengths


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_over_pages_in_a_file(name: str, engines: Engines, tmp_path: Path) -> None:
    parts = [TEXT * (24 if name == "mllama" else 12), picture(1), TEXT * 3, picture(2), "and?"]
    beyond, fewer = Overflow(tmp_path, 64 << 20), {"max_sequences": 2}
    engine = engines.start(name, pool_pages=14, overflow=beyond, settings=fewer)
    engine.check(parts, engine.answer(parts))
    pool = engine.engine.connector.pool
    assert isinstance(pool, OverflowPool)
    assert pool.stats.read_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_with_and_without_images_are_computed_together(name: str, engines: Engines) -> None:
    engine = engines.start(name, pool_pages=128, settings={"prefill_chunk": 48})
    asked = [[TEXT], ALL, [picture(5), TEXT], ["what is ", picture(1), TEXT * 2]]
    ids = [engine.add(parts) for parts in asked]
    fork = engine.engine.fork(ids[1])
    *answers, forked = engine.run(*ids, fork)
    for parts, answer in zip(asked, answers, strict=True):
        engine.check(parts, answer)
    engine.check(ALL, forked)


# -- reuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_about_an_image_encodes_it_once(name: str, engines: Engines, tmp_path: Path) -> None:
    engine = engines.start(name, store=str(tmp_path))
    parts: list[Any] = [TEXT, picture(1), "what is it?"]
    first = engine.answer(parts)
    settle(engine)
    before = len(engine.tokens(parts)[0])
    parts += [first.text, "the cat sat on the mat. and where?"]
    second = engine.answer(parts)
    engine.check(parts, second)
    assert second.metrics.reused_tokens >= before - 1 - CHUNK
    assert (engine.vision.encoded, engine.vision.found) == (1, 1)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [(100, 70), (56, 56)])
def test_two_images_of_one_size_share_no_page(
    name: str, size: tuple[int, int], engines: Engines, tmp_path: Path
) -> None:
    engine = engines.start(name, store=str(tmp_path))
    one, other = ([TEXT, picture(seed, *size), TEXT] for seed in (1, 2))
    assert engine.tokens(one)[0] == engine.tokens(other)[0]
    engine.answer(one)
    found = engine.answer(other)
    engine.check(other, found)
    assert found.metrics.reused_tokens <= engine.places(one)[0]
    assert found.metrics.reused_tokens or name == "gemma"  # windows are not saved at every token
    assert engine.answer(one).metrics.reused_tokens > found.metrics.reused_tokens
    assert engine.vision.encoded == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_another_encoder_or_processor_is_a_miss(name: str, engines: Engines, tmp_path: Path) -> None:
    parts = [TEXT, picture(1), TEXT]
    engine = engines.start(name, store=str(tmp_path / "store"))
    engine.answer(parts)
    start = engine.places(parts)[0]
    engines.end(engine)
    folder = write_folder(name, tmp_path / "changed")
    mean = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.5, 0.5]}
    rewrite_json(folder / "preprocessor_config.json", **mean)
    other = engines.start(name, load_model(str(folder), device="cpu"), store=str(tmp_path / "store"))
    found = other.answer(parts)
    other.check(parts, found)
    assert found.metrics.reused_tokens <= start
    assert (other.vision.encoded, other.vision.found) == (1, 0)
    engines.end(other)
    change_encoder(folder)
    changed = engines.start(name, load_model(str(folder), device="cpu"), store=str(tmp_path / "store"))
    assert changed.answer(parts).metrics.reused_tokens <= start
    assert (changed.vision.encoded, changed.vision.found) == (1, 0)


def change_encoder(folder: Path) -> None:
    """Change one number of the encoder's weights."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(
        each for each in sorted(tensors) if each.startswith(("visual", "vision_tower", "vision_model"))
    )
    tensors[name] = tensors[name] + torch.eye(*tensors[name].shape[-2:]).flatten()[0]
    save_file(tensors, file)


# -- words -------------------------------------------------------------------------------------------


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[PromptImage]]:
    tokens, images = draw(st.lists(st.integers(0, 9), max_size=5)), []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 12))
        content, mutual = bytes([draw(st.integers(0, 1))]) * 32, draw(st.booleans())
        images.append(PromptImage(len(tokens), torch.zeros(rows, 4), content, mutual=mutual))
        tokens += [5] * rows + draw(st.lists(st.integers(0, 9), max_size=5))
    return tokens, images


@given(prompts(), st.data())
@settings(max_examples=200)
def test_words_tell_images_apart(prompt: tuple[list[int], list[PromptImage]], data: st.DataObject) -> None:
    tokens, images = prompt
    known = PromptImages(tokens, images)
    changed = data.draw(st.integers(0, len(images) - 1))
    other = [
        PromptImage(each.start, each.embedding, b"x" * 32 if number == changed else each.content)
        for number, each in enumerate(images)
    ]
    words = PromptImages(tokens, other).words
    start, stop = images[changed].start, max(images[changed].stop, images[changed].start + 8)
    assert (known.words[:start] == words[:start]).all()
    assert (known.words[start:stop] != words[start:stop]).all()
    assert (known.words[start:stop] >= 1 << 31).all()
    if known.words[-1] < 1 << 31:  # text far behind an image is itself
        assert known.words[-1] == tokens[-1]
    for end in range(len(tokens) + 1):
        safe = known.shortened(end)
        assert safe <= end
        assert not any(each.start < safe < each.start + 8 for each in images)


def test_words_of_text_behind_an_image_are_as_different_as_the_text() -> None:
    """Among 150,000 tokens, some digests of 31 bits would be equal."""
    image = PromptImage(1, torch.zeros(6, 4), bytes(32))
    words = {int(PromptImages([7, *[5] * 6, token], [image]).words[7]) for token in range(150_000)}
    assert len(words) == 150_000
    assert min(words) >= 1 << 31


@given(prompts(), st.integers(1, 20))
def test_no_step_ends_inside_a_mutual_image(prompt: tuple[list[int], list[PromptImage]], chunk: int) -> None:
    tokens, images = prompt
    known, at = PromptImages(tokens, images), 0
    while at < len(tokens):
        stop = known.step_end(at, min(at + chunk, len(tokens)))
        assert at < stop <= max(at + chunk, at + known.longest_mutual)
        assert not any(each.mutual and each.start < stop < each.stop for each in images)
        at = stop


# -- refusals ----------------------------------------------------------------------------------------


def test_images_that_do_not_fit_are_refused(engines: Engines) -> None:
    engine = engines.start("qwen").engine
    for images, why in (
        ([PromptImage(0, torch.zeros(4, 32), bytes(32))], "has rows of 32 numbers, but the model needs 64"),
        ([PromptImage(0, torch.zeros(4, 64), bytes(32), (3, 2))], "cannot have positions of a grid"),
        ([PromptImage(8, torch.zeros(4, 64), bytes(32))], "they exceed the prompt of 10 tokens"),
        ([PromptImage(at, torch.zeros(4, 64), bytes(32)) for at in (0, 3)], "another image has them"),
    ):
        with pytest.raises(RequestError, match=why):
            engine.add([1] * 10, images=images)
    assert not engine.has_work


def test_an_image_that_no_step_holds_is_refused(engines: Engines) -> None:
    engine = engines.start("gemma", settings={"prefill_chunk": 16})
    with pytest.raises(RequestError, match="takes 36 tokens, which are computed together: start with --pre"):
        engine.add(ALL)
    engine.check([TEXT], engine.answer([TEXT]))


def broken(folder: Path, name: str) -> None:
    match name:
        case "processor":
            (folder / "preprocessor_config.json").unlink()
        case "tensor":
            from safetensors.torch import load_file, save_file

            tensors = load_file(folder / "model.safetensors")
            save_file(
                {each: tensor for each, tensor in tensors.items() if "patch_embed" not in each},
                folder / "model.safetensors",
            )


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("processor", "the processor of images cannot be read"),
        ("tensor", "tensor visual.patch_embed.proj.weight of the encoder of images is missing"),
    ],
)
def test_a_folder_without_a_part_for_images_still_computes_text(
    part: str, why: str, engines: Engines, tmp_path: Path
) -> None:
    broken(write_folder("qwen", tmp_path / "model"), part)
    engine = engines.start("qwen", load_model(str(tmp_path / "model"), device="cpu"))
    for _ in range(2):
        with pytest.raises(ModelError, match=why):
            engine.vision.process(picture(1))
    params: Sequence[int] = engine.engine.tokenizer.encode(TEXT, begin=False)
    assert engine.engine.generate([params])[0].tokens


# -- cross attention ---------------------------------------------------------------------------------


def admitted(engine: Pictured, parts: Sequence[Any]) -> tuple[int, CrossTable]:
    """Add a request and let it begin. Return its number, and its pages of images."""
    request = engine.add(parts)
    sequence = engine.engine._roster.get(request)
    assert sequence is not None
    while not sequence.started:
        engine.engine.step()
    [table] = (each for each in sequence.tables if isinstance(each, CrossTable))
    return request, table


@pytest.mark.parametrize("tier", ["hbm", "host", "disk"])
def test_an_image_at_another_place_of_another_prompt_is_a_hit(
    tier: str, engines: Engines, tmp_path: Path
) -> None:
    engine = engines.start("mllama", store=str(tmp_path))
    engine.answer([TEXT, picture(1), "and?"])
    settle(engine)
    if tier == "host":
        engine.engine._keeper.evict_idle()
    elif tier == "disk":
        engines.end(engine)
        engine = engines.start("mllama", store=str(tmp_path))
    parts = ["what is ", picture(1), TEXT * 2]
    request, table = admitted(engine, parts)
    assert (table.ready, table.published) == ({0}, {0})
    [found] = engine.run(request)
    engine.check(parts, found)
    assert found.metrics.reused_tokens == 0


def test_text_beside_images_has_no_page_of_them(engines: Engines) -> None:
    """Requests with and without images in the same steps."""
    engine = engines.start("mllama", settings={"prefill_chunk": 16})
    request, table = admitted(engine, [TEXT])
    assert (table.pages, table.kept(10_000)) == ([], 0)
    parts = [picture(1, 40, 40), picture(2), TEXT]
    neighbour, shown = admitted(engine, parts)
    assert len(shown.pages) == 7  # 1 tile and 4 tiles of 17 rows, on pages of 16
    answers = engine.run(request, neighbour)
    for asked, answer in zip(([TEXT], parts), answers, strict=True):
        engine.check(asked, answer)


def test_a_lost_page_of_an_image_is_computed_again(engines: Engines) -> None:
    engine = engines.start("mllama")
    parts = [TEXT, picture(1), TEXT * 2]
    engine.answer(parts)
    group = engine.engine.model.config.cross
    assert group is not None
    assert engine.engine.connector.evict(1, group=group) == 1
    found = engine.answer(parts)
    engine.check(parts, found)
    assert found.metrics.reused_tokens <= engine.places(parts)[0]
    assert engine.answer(parts).metrics.reused_tokens > engine.places(parts)[0]


def test_an_image_is_loaded_from_two_tiers(engines: Engines, tmp_path: Path) -> None:
    """The last pages are in HBM, the others below."""
    engine = engines.start("mllama", store=str(tmp_path))
    engine.answer([TEXT, picture(1), "and?"])
    settle(engine)
    engine.engine._keeper.evict_idle()
    group, connector = engine.engine.model.config.cross, engine.engine.connector
    assert group is not None
    parts = ["what is ", picture(1), TEXT * 2]
    sequence = engine.engine._roster.get(engine.add(parts))
    assert sequence is not None
    pages = sequence.prompt.pages_of_input(group, 0).part([3, 4])
    loaded = connector.load(connector.lookup(pages)).wait()
    connector.release(loaded.groups[group].pages, group=group)
    [found] = engine.run(sequence.request_id)
    engine.check(parts, found)
    assert found.metrics.loaded_bytes == 3 * connector.pools[group].spec.page_bytes


def test_images_that_fill_the_pool_are_refused(engines: Engines) -> None:
    engine = engines.start("mllama", pool_pages=8)
    with pytest.raises(RequestError, match=r"pages of every kind at once \(3 of full_attention, 50 of cross"):
        engine.add([picture(at, 60, 200) for at in range(10)] + [TEXT * 2])
    with pytest.raises(RequestError, match="if and only if the model has cross-attention layers"):
        engine.engine.add([1] * 10, images=[PromptImage(0, torch.zeros(4, 64), bytes(32))])
    assert not engine.engine.has_work


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"deterministic": True}, "--deterministic does not work with cross attention"),
        ({"tensor_parallel": 2}, "--tensor-parallel does not work with cross attention"),
        ({"sequence_parallel": 2}, "--sequence-parallel does not work with cross attention"),
        ({"adapters": ["a=/none"]}, "--adapter does not work with cross attention"),
        ({"kv_dtype": "int8", "kv_scales": "/none"}, "--kv-scales does not work with cross attention"),
    ],
)
def test_what_does_not_work_with_cross_attention_is_refused(
    options: dict[str, Any], why: str, folders: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError, match=f"^{why}"):
        open_model(str(folders("mllama")), device="cpu", **options)


def test_cross_attention_is_for_the_cpu(folders: Callable[[str], Path]) -> None:
    opened = replace(open_model(str(folders("mllama")), device="cpu"), device="cuda")
    with pytest.raises(UsageError, match=r"^cross attention is computed on the CPU only"):
        _check_gpu(opened)
