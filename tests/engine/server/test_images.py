"""Images over HTTP: answers are the engine's own, and bad images are one clear 400 that leaves nothing."""

from __future__ import annotations

import base64
import io
import struct
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

import hypothesis.strategies as st
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from PIL import Image

from tests.engine.pictured import FAMILIES, Pictured, data_url, picture, pictured, template, write_folder
from tierstore_engine.build import load_model
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.server.errors import ApiError
from tierstore_engine.server.pictures import MOST_IMAGES, MOST_PIXELS, read_image

from .live import Live

Serve = Callable[..., Live]
MODEL = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    return cache(
        lambda name: load_model(str(write_folder(name, tmp_path_factory.mktemp(name))), device="cpu")
    )


@pytest.fixture
def engine(models: Callable[[str], LoadedModel], name: str, tmp_path: Path) -> Pictured:
    return pictured(name, models(name), store=str(tmp_path / "store"), pool_pages=80)


@pytest.fixture
def live(engine: Pictured, serve: Serve) -> Live:
    return serve(engine.engine, template=template(engine.name), owned=True)


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": "user", "content": parts}


def ask(live: Live, *messages: dict[str, Any], **fields: Any) -> Any:
    return live.http.post("/v1/chat/completions", json={**MODEL, "messages": list(messages), **fields})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_about_images(engine: Pictured, live: Live, name: str) -> None:
    shown = picture(1)
    question = user("what is ", image(data_url(shown), detail="auto"), " and where?")
    parts = ["user: what is ", shown, " and where?\nassistant: "]
    tokens = engine.tokens(parts)[0]
    counted = live.http.post("/tokenize", json={"model": "tiny", "messages": [question]}).json()
    assert counted["tokens"] == tokens
    assert engine.vision.encoded == 0
    first = ask(live, question).json()
    assert first["usage"]["prompt_tokens"] == len(tokens)
    said = first["choices"][0]["message"]["content"]
    again = ask(live, question, {"role": "assistant", "content": said}, user("and why?"), n=2).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(tokens) - 17
    assert (engine.vision.encoded, engine.vision.found) == (1, 1)
    metrics = live.http.get("/metrics").text
    assert "tierstore_engine_encoded_images_total 1.0" in metrics
    assert "tierstore_engine_found_images_total 1.0" in metrics
    jpeg = ask(live, user(image(data_url(picture(2), "jpeg")), image(data_url(shown, "webp"))))
    assert jpeg.status_code == 200
    live.wait_until_idle()
    engine.engine._keeper.evict_idle()


@pytest.mark.parametrize("name", ["qwen"])
def test_the_answer_is_that_of_transformers(engine: Pictured, live: Live, name: str) -> None:
    shown = picture(4)
    answer = ask(live, user(image(data_url(shown)), "what?"), logprobs=True).json()["choices"][0]
    parts = ["user: ", shown, "what?\nassistant: "]
    logits = engine.expected(parts, ())[0].log_softmax(-1)
    assert answer["logprobs"]["content"][0]["logprob"] == pytest.approx(float(logits.max()), abs=1e-4)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG with any size in its header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def bytes_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


GOOD = data_url(picture(1))
BAD: dict[str, tuple[Any, str]] = {
    "http": ([image("https://example.com/x.png")], "images are not fetched from URLs: send data:image/png"),
    "file": ([image("file:///etc/passwd")], "images are not fetched from URLs"),
    "gif": ([image(url_of(bytes_of(picture(1), "gif"), "gif"))], "must be data:image/png, jpeg or webp"),
    "disguised": ([image(url_of(bytes_of(picture(1), "bmp")))], "not a readable PNG, JPEG or WebP"),
    "base64": ([image("data:image/png;base64,????")], "the bytes of an image are not valid base64"),
    "empty": ([image("data:image/png;base64,")], "not a readable PNG, JPEG or WebP"),
    "text": ([image(url_of(b"no image"))], "not a readable PNG, JPEG or WebP"),
    "bomb": (
        [image(url_of(png(50_000, 50_000, zlib.compress(bytes(1 << 20)))))],
        f"more than {MOST_PIXELS}",
    ),
    "large": ([image(url_of(png(MOST_PIXELS + 1, 1)))], f"has {MOST_PIXELS + 1} × 1 pixels, more than"),
    "truncated": ([image(url_of(bytes_of(picture(1), "jpeg")[:-200], "jpeg"))], "an image is damaged"),
    "cut": ([image(url_of(bytes_of(picture(1), "png")[:60]))], "an image is damaged"),
    "animated": (
        [image(url_of(bytes_of(picture(1), "png", save_all=True, append_images=[picture(2)])))],
        "animated images are not supported",
    ),
    "narrow": ([image(data_url(Image.new("RGB", (900, 3))))], "the model's processor refuses an image"),
    "many": ([image(url_of(b""))] * 10_000, f"at most {MOST_IMAGES} images, got 10000"),
    "long": (
        [image(data_url(picture(1, 168, 168)))] * 60,
        "tokens, but the model allows 1280 including the answer",
    ),
    "detail": ([image(GOOD, detail="high")], "detail"),
    "marker": (["<image>", image(GOOD)], "the chat has 1 images, but its text has 2 places for images"),
    "audio": ([{"type": "input_audio"}], "input_audio"),
    "explained": ([image(GOOD)], "explain_cache and prompt_cache_options do not work with images"),
}


@pytest.mark.parametrize("name", ["qwen"])
def test_bad_images_are_refused(engine: Pictured, live: Live, name: str) -> None:
    for case, (content, why) in BAD.items():
        answer = ask(live, user(*content), explain_cache=case == "explained")
        assert answer.status_code == 400, (case, answer.text)
        message = answer.json()["error"]["message"]
        assert why in message, (case, message)
        assert "\n" not in message
    assert ask(live, user("still here?")).status_code == 200


@given(
    kind=st.sampled_from(["png", "jpeg", "webp"]),
    cut=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=4),
)
@hypothesis_settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged EXIF data
def test_a_damaged_image_is_an_image_or_one_error(
    kind: str, cut: float, changes: list[tuple[float, int]]
) -> None:
    shown = picture(1, 20, 30)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "text"
    data = bytearray(bytes_of(shown, kind, exif=exif))
    for at, value in changes:
        data[int(at * len(data))] = value
    data = data[: len(data) if cut > 0.7 else int(cut * len(data))]
    try:
        found, status, why = read_image(url_of(bytes(data), kind)), 200, ""
    except ApiError as error:
        found, status, why = None, error.status, str(error)
    assert "\n" not in why
    if found is None:
        assert status == 400
        return
    assert found.mode == "RGB"
    if not changes and cut > 0.7:
        assert found.size == (30, 20)  # upright


def test_an_image_is_upright_whatever_else_its_exif_data_say() -> None:
    """Also with a resolution that is text, which Pillow cannot write again."""
    entries = struct.pack("<HHIHxx", 0x0112, 3, 1, 6) + struct.pack("<HHI4s", 0x011A, 2, 4, b"abc")
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4)
    shown = picture(1, 20, 30)
    found = read_image(url_of(bytes_of(shown, "webp", exif=exif, lossless=True), "webp"))
    assert found.tobytes() == shown.transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("name", ["qwen"])
def test_images_need_transformers(
    engine: Pictured, live: Live, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    answer = ask(live, user(image(GOOD)))
    assert answer.status_code == 400
    assert "images need transformers and Pillow" in answer.json()["error"]["message"]
    assert ask(live, user("text")).status_code == 200


def test_a_model_without_images_refuses_them(
    tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Serve
) -> None:
    answer = ask(serve(engine_of(tiny)), user(image(GOOD)))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "this model takes no images here: send text only"
