"""Tiny models that take images, what transformers computes with them, and engines over a store."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.tiny_models import VOCAB, train_tokenizer
from tierstore_engine.build import build_engine
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.vision import ProcessedImage, Vision

FAMILIES = ("qwen", "gemma", "mllama")
CHUNK = 16  # tokens a page
NEW = 6  # tokens of an answer

_MARKER, _START, _END, _PLACEHOLDER = "<image>", "<start>", "<end>", "<soft>"
_SPECIAL = [_MARKER, _START, _END, _PLACEHOLDER]
_MARKS = {"qwen": f"{_START}{_MARKER}{_END}", "gemma": _START, "mllama": _MARKER}
_TEXT = {
    "vocab_size": VOCAB + 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}START{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@cache
def _tokenizer() -> Tokenizer:
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    return tokenizer


def _id(name: str) -> int:
    token = _tokenizer().token_to_id(name)
    assert token is not None
    return int(token)


@cache
def reference(name: str) -> Any:
    """The model of transformers, with random weights."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if name == "qwen":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        text: Mapping[str, Any] = {**_TEXT, "num_hidden_layers": 3, "rope_parameters": rope}
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
        }
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
        of_images = {"image_token_id": _id(_MARKER), "video_token_id": VOCAB + 9}
        of_images |= {"vision_start_token_id": _id(_START), "vision_end_token_id": _id(_END)}
        config: Any = transformers.Qwen2_5_VLConfig(
            text_config={**text}, vision_config=vision, tie_word_embeddings=False, **of_images
        )
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif name == "mllama":
        text = {**_TEXT, "vocab_size": VOCAB, "num_hidden_layers": 5, "cross_attention_layers": [1, 3]}
        text |= {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1}
        vision |= {"attention_heads": 2, "image_size": 56, "patch_size": 14, "max_num_tiles": 4}
        vision |= {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96}
        config = transformers.MllamaConfig(
            text_config={**text}, vision_config=vision, image_token_index=_id(_MARKER)
        )
        model = transformers.MllamaForConditionalGeneration(config)
    else:
        text = {**_TEXT, "num_hidden_layers": 6, "sliding_window": 21, "query_pre_attn_scalar": 16}
        vision = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        vision |= {"image_size": 84, "patch_size": 14}
        of_images = {"mm_tokens_per_image": 36, "image_token_index": _id(_PLACEHOLDER)}
        of_images |= {"boi_token_index": _id(_START), "eoi_token_index": _id(_END)}
        config = transformers.Gemma3Config(text_config={**text}, vision_config=vision, **of_images)
        config._attn_implementation = "eager"
        model = transformers.Gemma3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(11)
    for parameter, tensor in model.named_parameters():
        small = "norm" in parameter or "bias" in parameter
        deviation = 0.1 if small else 1.5 * tensor.shape[-1] ** -0.5
        mean = float("norm" in parameter and (name != "gemma" or "vision" in parameter))
        torch.nn.init.normal_(tensor, mean, deviation, generator=generator)
    return model.eval()


def write_folder(name: str, folder: Path) -> Path:
    """Write the checkpoint of a model, with its tokenizer and processor."""
    reference(name).save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    if name == "qwen":
        kind: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}
        kind |= {"size": {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}}
    elif name == "mllama":
        kind = {"image_processor_type": "MllamaImageProcessor", "size": {"height": 56, "width": 56}}
        kind |= {"max_image_tiles": 4}
    else:
        kind = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 84, "width": 84}}
        kind |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind))
    (folder / "chat_template.jinja").write_text(template(name))
    return folder


def write_draft(folder: Path) -> Path:
    """Write the checkpoint of a small model with the same vocabulary, which drafts for the others."""
    import transformers

    config = transformers.Qwen2Config(**{**_TEXT, "num_hidden_layers": 1})
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def template(name: str) -> str:
    """A chat template that marks images as the family's own does."""
    return TEMPLATE.replace("START", _MARKS[name])


def picture(seed: int, width: int = 100, height: int = 70) -> Image.Image:
    """An image of its own for each seed."""
    colours = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def data_url(image: Image.Image, kind: str = "png") -> str:
    data = io.BytesIO()
    image.save(data, kind)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


@dataclass(frozen=True)
class Pictured:
    """An engine of a model that takes images."""

    engine: Engine
    name: str

    @property
    def vision(self) -> Vision:
        assert self.engine.vision is not None
        return self.engine.vision

    def tokens(self, parts: Sequence[str | Image.Image]) -> tuple[list[int], list[ProcessedImage]]:
        """The tokens of texts and images in turn, and what the processor makes of the images."""
        images = [self.vision.process(part) for part in parts if not isinstance(part, str)]
        text = "".join(part if isinstance(part, str) else _MARKS[self.name] for part in parts)
        self.vision.check_text(text, len(images))
        expanded = self.vision.expanded(text, [each.tokens for each in images])
        tokens = self.engine.tokenizer.encode(expanded, begin=False)
        return tokens, images

    def places(self, parts: Sequence[str | Image.Image]) -> list[int]:
        """The first token of each image."""
        tokens, images = self.tokens(parts)
        return self.vision.places(tokens, [each.tokens for each in images]) if images else []

    def add(self, parts: Sequence[str | Image.Image], new: int = NEW, **arguments: Any) -> int:
        tokens, images = self.tokens(parts)
        placed = list(map(self.vision.embed, images, self.places(parts)))
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, keep_logits=True)
        return self.engine.add(tokens, params, images=placed, **arguments)

    def run(self, *ids: int) -> list[Completion]:
        done: dict[int, Completion] = {}
        while len(done) < len(ids):
            for output in self.engine.step():
                if output.completion is not None:
                    done[output.request_id] = output.completion
        return [done[each] for each in ids]

    def answer(self, parts: Sequence[str | Image.Image], new: int = NEW) -> Completion:
        return self.run(self.add(parts, new))[0]

    def expected(self, parts: Sequence[str | Image.Image], answer: Sequence[int]) -> torch.Tensor:
        """The logits of transformers for each token of an answer, and for the token behind it."""
        tokens, images = self.tokens(parts)
        model, known = reference(self.name), torch.tensor([[*tokens, *answer]])
        if self.name == "mllama":
            with torch.inference_mode(), _without_early_rows(model, self.places(parts)):
                logits = model(input_ids=known, **_mllama_inputs(known[0].tolist(), images)).logits[0]
            return logits[len(tokens) - 1 :].float()
        token = _id(_MARKER if self.name == "qwen" else _PLACEHOLDER)
        kinds = (known == token).int()
        inputs: dict[str, Any] = {}
        if images:
            inputs["pixel_values"] = torch.cat([each.inputs["pixel_values"] for each in images])
        if images and self.name == "qwen":
            inputs["image_grid_thw"] = torch.cat([each.inputs["grid_thw"] for each in images])
        inputs["mm_token_type_ids" if self.name == "qwen" else "token_type_ids"] = kinds
        with torch.inference_mode():
            logits = model(input_ids=known, **inputs).logits[0]
        return logits[len(tokens) - 1 :].float()

    def check(self, parts: Sequence[str | Image.Image], answer: Completion) -> None:
        """Compare the logits of an answer with those of transformers."""
        expected = self.expected(parts, answer.tokens[:-1])
        assert answer.logits is not None
        torch.testing.assert_close(torch.from_numpy(answer.logits), expected, rtol=0, atol=1e-4)


def _mllama_inputs(tokens: list[int], images: Sequence[ProcessedImage]) -> dict[str, Any]:
    from transformers.models.mllama import processing_mllama as processing

    if not images:
        return {}
    inputs = {name: torch.cat([each.inputs[name] for each in images], dim=1) for name in images[0].inputs}
    tiles = [[int(each.inputs["aspect_ratio_mask"].sum()) for each in images]]
    seen = [processing.get_cross_attention_token_mask(tokens, _id(_MARKER))]
    mask = processing.convert_sparse_cross_attention_mask_to_dense(seen, tiles, 4, len(tokens))
    return {**inputs, "cross_attention_mask": torch.from_numpy(mask)}


@contextmanager
def _without_early_rows(model: Any, places: Sequence[int]) -> Iterator[None]:
    """Let text before the first image see no image. In transformers it sees all of them; Meta's own
    implementation multiplies its attention by 0."""

    def hidden(_: Any, __: Any, given: Any) -> Any:
        attended = given[0].clone()
        attended[:, : places[0]] = 0
        return attended, *given[1:]

    layers = [each for each in model.modules() if type(each).__name__ == "MllamaTextCrossAttention"]
    hooks = [each.register_forward_hook(hidden) for each in layers if places and places[0]]
    yield
    for hook in hooks:
        hook.remove()


def pictured(
    name: str,
    model: LoadedModel,
    *,
    pool_pages: int = 64,
    store: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Pictured:
    made = EngineSettings(**{"prefill_chunk": 48, "plan": "load", **(settings or {})})
    engine = build_engine(
        model,
        pool_pages=pool_pages,
        store=store,
        chunk_tokens=CHUNK,
        settings=made,
        host_bytes=16 << 20,
        disk_bytes=64 << 20,
        **arguments,
    )
    return Pictured(engine, name)
