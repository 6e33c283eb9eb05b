"""The images of a model: transformers' processor and encoder, and the embeddings that they compute.

The engine has no encoders of its own. It uses those of transformers, on the CPU and in the model's dtype. The
first image imports transformers and Pillow, and reads the encoder's weights. Prompts without images need
neither.

An embedding is found by a SHA-256 over the processor's output, under an identity with the encoder's weights,
its configuration and the version of transformers. The encoder therefore runs only for an image that the store
does not have. The processor's configuration changes its output, and thereby the content.
"""

from __future__ import annotations

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierstore.extras import install
from tierstore.keys import Identity
from tierstore.sizing import embedding_worth
from tierstore.spec import KVSpec, positive, read_json
from tierstore_connectors.base import Connector
from tierstore_connectors.common.embeddings import EmbeddingKey, embedding_of, pages_of
from tierstore_engine.checkpoint import CONFIG_FILE, Checkpoint
from tierstore_engine.errors import ModelError, RequestError
from tierstore_engine.images import PromptImage
from tierstore_engine.loaded import LoadedModel

if TYPE_CHECKING:
    from PIL.Image import Image

    from tierstore import Store

_LOAD_S = 5.0  # how long the encoder waits for an embedding that the store has found


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """A processor's output for an image, with the encoder's ``inputs``. ``rows`` is the number of tokens that
    the image takes, or one if it is ``crossed``. ``content`` is a SHA-256 over the inputs."""

    inputs: Mapping[str, torch.Tensor]
    rows: int
    grid: tuple[int, int] | None
    content: bytes
    crossed: bool = False

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the image takes."""
        return 1 if self.crossed else self.rows


class _Family(ABC):
    """How one family of models writes images into prompts, and which classes of transformers compute them."""

    mutual = False  # whether the tokens of an image see one another
    crossed = False  # whether cross-attention layers read the embedding

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """Raises :class:`SpecError` for a ``config.json`` without the needed fields."""
        self.raw = raw

    @property
    @abstractmethod
    def token(self) -> int:
        """Return the id of the placeholder of an image's tokens."""

    @property
    def marker(self) -> int:
        """Return the id of the token that a chat template writes for an image."""
        return self.token

    def expanded(self, written: Callable[[int], str], rows: int) -> str:
        """Return the text for an image of ``rows`` tokens, which replaces the marker that a template writes.
        ``written`` returns the text of a special token."""
        return written(self.token) * rows

    @abstractmethod
    def processor(self, folder: Path) -> Any:
        """Return transformers' processor of images, from the folder of a model. It needs Pillow only."""

    @abstractmethod
    def process(
        self, processor: Any, image: Image
    ) -> tuple[dict[str, torch.Tensor], int, tuple[int, int] | None]:
        """Return the encoder's inputs of an image, the number of its tokens, and its grid if it has one."""

    @abstractmethod
    def encoder(self) -> torch.nn.Module:
        """Return transformers' encoder, without weights. Its parameters are named as in the checkpoint."""

    @abstractmethod
    def encode(self, encoder: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the embedding of an image, ``[rows, hidden_size]``."""


class _Qwen25(_Family):
    """Qwen2.5-VL: images keep their shape, and their tokens have a row and a column."""

    @property
    def token(self) -> int:
        return positive(self.raw, "image_token_id")

    def processor(self, folder: Path) -> Any:
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
                Qwen2VLImageProcessorPil as Processor,
            )
        except ImportError:  # before transformers 5
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
                Qwen2VLImageProcessor as Processor,
            )
        return Processor.from_pretrained(folder, local_files_only=True)

    def process(
        self, processor: Any, image: Image
    ) -> tuple[dict[str, torch.Tensor], int, tuple[int, int] | None]:
        made = processor(images=[image], return_tensors="pt")
        merged = int(self.raw["vision_config"].get("spatial_merge_size", 2))
        _, height, width = (int(each) for each in made["image_grid_thw"][0])
        grid = height // merged, width // merged
        inputs = {"pixel_values": made["pixel_values"], "grid_thw": made["image_grid_thw"]}
        return inputs, grid[0] * grid[1], grid

    def encoder(self) -> torch.nn.Module:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        config = Qwen2_5_VLVisionConfig(**self.raw["vision_config"])
        tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(config, attn_implementation="sdpa")
        return torch.nn.ModuleDict({"visual": tower})

    def encode(self, encoder: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert isinstance(encoder, torch.nn.ModuleDict)
        tower = encoder["visual"]
        dtype = next(tower.parameters()).dtype
        made = tower(inputs["pixel_values"].to(dtype), grid_thw=inputs["grid_thw"])
        embedding = made if isinstance(made, torch.Tensor) else made.pooler_output
        assert isinstance(embedding, torch.Tensor)
        return embedding


def _placeholder(raw: Mapping[str, Any]) -> int:
    """Return the id of an image's token from a ``config.json`` of any version of transformers."""
    return positive(raw, "image_token_index" if "image_token_index" in raw else "image_token_id")


class _Gemma3(_Family):
    """Gemma 3: each image is scaled to one size and takes the same number of tokens, which see one
    another."""

    mutual = True

    @property
    def token(self) -> int:
        return _placeholder(self.raw)

    @property
    def marker(self) -> int:
        return positive(self.raw, "boi_token_index")

    def expanded(self, written: Callable[[int], str], rows: int) -> str:
        end = written(positive(self.raw, "eoi_token_index"))
        return f"\n\n{written(self.marker)}{written(self.token) * rows}{end}\n\n"

    def processor(self, folder: Path) -> Any:
        try:
            from transformers.models.gemma3.image_processing_pil_gemma3 import (
                Gemma3ImageProcessorPil as Processor,
            )
        except ImportError:  # before transformers 5
            from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor as Processor
        return Processor.from_pretrained(folder, local_files_only=True)

    def process(
        self, processor: Any, image: Image
    ) -> tuple[dict[str, torch.Tensor], int, tuple[int, int] | None]:
        made = processor(images=[image], return_tensors="pt", do_pan_and_scan=False)
        return {"pixel_values": made["pixel_values"]}, positive(self.raw, "mm_tokens_per_image"), None

    def encoder(self) -> torch.nn.Module:
        from transformers import AutoModel, Gemma3Config
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        config = Gemma3Config(**self.raw)
        tower = AutoModel.from_config(config.vision_config, attn_implementation="sdpa")
        return torch.nn.ModuleDict(
            {"vision_tower": tower, "multi_modal_projector": Gemma3MultiModalProjector(config)}
        )

    def encode(self, encoder: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert isinstance(encoder, torch.nn.ModuleDict)
        tower = encoder["vision_tower"]
        made = tower(pixel_values=inputs["pixel_values"].to(next(tower.parameters()).dtype))
        embedding = encoder["multi_modal_projector"](made.last_hidden_state)[0]
        assert isinstance(embedding, torch.Tensor)
        return embedding


class _Mllama(_Family):
    """Llama 3.2 Vision: an image is cut into tiles, and takes one token of the prompt. Cross-attention layers
    read the rows of the tiles."""

    crossed = True

    @property
    def token(self) -> int:
        return _placeholder(self.raw)

    def processor(self, folder: Path) -> Any:
        try:
            from transformers.models.mllama.image_processing_pil_mllama import (
                MllamaImageProcessorPil as Processor,
            )
        except ImportError:  # before transformers 5
            from transformers.models.mllama.image_processing_mllama import MllamaImageProcessor as Processor
        return Processor.from_pretrained(folder, local_files_only=True)

    def process(
        self, processor: Any, image: Image
    ) -> tuple[dict[str, torch.Tensor], int, tuple[int, int] | None]:
        made = processor(images=[[image]], return_tensors="pt")
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        inputs = {name: torch.as_tensor(made[name]) for name in names}
        vision = self.raw["vision_config"]
        rows = (positive(vision, "image_size") // positive(vision, "patch_size")) ** 2 + 1
        return inputs, int(inputs["aspect_ratio_mask"].sum()) * rows, None

    def encoder(self) -> torch.nn.Module:
        from transformers import MllamaConfig
        from transformers.models.mllama.modeling_mllama import MllamaVisionModel

        config = MllamaConfig(**self.raw)
        tower = MllamaVisionModel._from_config(config.vision_config, attn_implementation="sdpa")
        widths = config.vision_config.vision_output_dim, config.text_config.hidden_size
        return torch.nn.ModuleDict({"vision_model": tower, "multi_modal_projector": torch.nn.Linear(*widths)})

    def encode(self, encoder: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert isinstance(encoder, torch.nn.ModuleDict)
        tower = encoder["vision_model"]
        pixels = inputs["pixel_values"].to(next(tower.parameters()).dtype)
        rest = {name: inputs[name] for name in ("aspect_ratio_ids", "aspect_ratio_mask")}
        embedding = encoder["multi_modal_projector"](tower(pixel_values=pixels, **rest).last_hidden_state)
        tiles = int(inputs["aspect_ratio_mask"].sum())  # padding tiles follow
        assert isinstance(embedding, torch.Tensor)
        return embedding[0, 0, :tiles].flatten(0, 1)


_FAMILIES: Mapping[str, type[_Family]] = {
    "Gemma3ForConditionalGeneration": _Gemma3,
    "MllamaForConditionalGeneration": _Mllama,
    "Qwen2_5_VLForConditionalGeneration": _Qwen25,
}


class Vision:
    """The images of one model. Thread-safe: one image is processed or encoded at a time.

    ``encoded`` counts the images that the encoder has computed, ``found`` the embeddings that the store had.
    """

    def __init__(self, family: _Family, folder: Path, model: LoadedModel, connector: Connector) -> None:
        self.encoded = self.found = 0
        self._family = family
        self._folder = folder
        self._config = model.config
        self._tokenizer = model.tokenizer
        self._connector = connector
        self._lock = threading.Lock()
        # These are None until the first image arrives:
        self._processor: Any = None
        self._encoder: torch.nn.Module | None = None
        self._identity: Identity | None = None
        self._store: Store | None = None

    @classmethod
    def of(cls, model: LoadedModel, connector: Connector) -> Vision | None:
        """Return the images of a model. None for a model that takes no images, that is not in a checkpoint
        folder, or whose images this engine does not compute."""
        if model.source is None or model.source.is_file():
            return None
        raw = read_json(model.source / CONFIG_FILE)
        names = raw.get("architectures") or ()
        family = next((_FAMILIES[name] for name in names if name in _FAMILIES), None)
        if family is None or not isinstance(raw.get("vision_config"), Mapping):
            return None
        return cls(family(raw), model.source, model, connector)

    def process(self, image: Image) -> ProcessedImage:
        """Run the model's processor on an image, and return its output. Raises :class:`RequestError` for an
        image that it refuses, and :class:`ModelError` if the processor cannot be used."""
        with self._lock:
            self._open()
            try:
                inputs, rows, grid = self._family.process(self._processor, image)
            except ValueError as error:
                raise RequestError(f"the model's processor refuses an image: {str(error)[:200]}") from None
        return ProcessedImage(inputs, rows, grid, _digest(inputs), self._family.crossed)

    def check_text(self, text: str, images: int) -> None:
        """Raise :class:`RequestError` unless a rendered chat has a place for each of its images."""
        marker, placeholder = self._written(self._family.marker), self._written(self._family.token)
        places = text.count(marker) + (text.count(placeholder) if placeholder != marker else 0)
        if places != images:
            raise RequestError(
                f"the chat has {images} images, but its text has {places} places for images: the chat "
                f"template must write {marker} once for each image, and no text may contain {marker} or "
                f"{placeholder}"
            )

    def expanded(self, text: str, rows: Sequence[int]) -> str:
        """Return a rendered chat with the tokens of its images, whose numbers are ``rows``, in the places
        that the template has left for them."""
        first, *after = text.split(self._written(self._family.marker))
        images = (self._family.expanded(self._written, each) for each in rows)
        return first + "".join(image + part for image, part in zip(images, after, strict=True))

    def places(self, tokens: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Return the index of each image's first token in the tokens of an expanded chat."""
        places = [at for at, token in enumerate(tokens) if token == self._family.token]
        firsts = (
            [places[sum(rows[:number])] for number in range(len(rows))] if len(places) == sum(rows) else []
        )
        expected = [
            at for first, count in zip(firsts, rows, strict=False) for at in range(first, first + count)
        ]
        if not firsts or places != expected:
            raise ModelError("the tokenizer does not keep the tokens of images together")
        return firsts

    def embed(self, image: ProcessedImage, start: int = 0) -> PromptImage:
        """Return an image with its embedding. If the store does not have the embedding, the encoder computes
        it, and it is saved. Raises :class:`ModelError` if the encoder does not fit its configuration."""
        with self._lock:
            self._open()
            assert self._identity is not None
            key = EmbeddingKey(self._identity, image.content, image.rows)
            embedding = self._loaded(key)
            if embedding is None:
                embedding = self._encoded(image, key)
        content = hashlib.sha256(self._identity.digest + image.content).digest()
        family = self._family
        return PromptImage(start, embedding, content, image.grid, family.mutual, family.crossed)

    # -- inside --------------------------------------------------------------------------------------

    def _loaded(self, key: EmbeddingKey) -> torch.Tensor | None:
        if self._store is None:
            return None
        prompt, spec = key.prompt, key.spec
        pages = torch.empty(-(-key.rows // spec.chunk_tokens), spec.page_bytes, dtype=torch.uint8)
        hit = self._store.lookup(prompt)
        if hit.tokens < len(prompt):
            hit.release()
            return None
        loaded = self._store.load(hit, list(pages.numpy()), deadline_s=_LOAD_S).wait()
        if loaded.tokens < len(prompt):
            return None
        self.found += 1
        return embedding_of(pages, key)

    @torch.inference_mode()
    def _encoded(self, image: ProcessedImage, key: EmbeddingKey) -> torch.Tensor:
        assert self._encoder is not None
        embedding = self._family.encode(self._encoder, image.inputs).clone()
        if tuple(embedding.shape) != key.shape:
            raise ModelError(
                f"the encoder returned a shape of {list(embedding.shape)}, the model needs {list(key.shape)}"
            )
        self.encoded += 1
        if self._store is not None:
            self._store.save(key.prompt, list(pages_of(embedding, key).numpy()))
        return embedding

    def _open(self) -> None:
        """Read the processor and the encoder, once."""
        if self._identity is not None:
            return
        try:
            import PIL.Image  # noqa: F401
            import transformers
        except ImportError as error:
            raise RequestError(
                f"images need transformers and Pillow ({error}): {install('images')}"
            ) from None
        try:
            self._processor = self._family.processor(self._folder)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(
                f"{self._folder}: the processor of images cannot be read: {str(error).splitlines()[0]}"
            ) from error
        try:
            encoder = self._family.encoder()
            config = transformers.AutoConfig.for_model(**self._family.raw)  # with defaults
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(
                f"{self._folder}: transformers cannot make this encoder of images: {error}"
            ) from error
        weights = _read_weights(encoder, self._folder)
        for weight in encoder.parameters():  # keep the angles of positions in float32
            weight.data = weight.data.to(getattr(torch, self._config.dtype))
        self._encoder = encoder.eval().requires_grad_(False)
        worth = embedding_worth(config.to_dict())
        spec = KVSpec.embedding(width=self._config.hidden_size, dtype=self._config.dtype, worth=worth)
        described = json.dumps(self._family.raw, sort_keys=True)
        model = hashlib.sha256(f"{transformers.__version__} {torch.__version__} {described}".encode())
        identity = Identity.of(spec, model=model.hexdigest(), revision=weights, codec="engine-encoder")
        self._store = self._connector.embeddings(spec, identity)
        self._identity = identity

    def _written(self, token: int) -> str:
        text = self._tokenizer.written(token)
        if text is None:
            raise ModelError(f"the tokenizer has no added token {token}, which config.json names for images")
        return text


def _read_weights(encoder: torch.nn.Module, folder: Path) -> str:
    """Fill an encoder from a checkpoint. Return a SHA-256 over its weights. Raises :class:`ModelError` for a
    tensor that is missing or of another shape."""
    state = encoder.state_dict()
    digest = hashlib.sha256()
    stored = Checkpoint(folder)
    with stored:
        found = {_own_name(name, state): name for name in stored.named(_PARTS)}
        for name, tensor in sorted(state.items()):
            if name not in found:
                raise ModelError(f"{folder}: tensor {name} of the encoder of images is missing")
            read = stored.read(found[name], tensor.shape)
            _hash(digest, name, read)
            tensor.copy_(read)
    return digest.hexdigest()


_PARTS = r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\..*"


def _own_name(name: str, state: Mapping[str, torch.Tensor]) -> str:
    """Return the encoder's name for a tensor of a checkpoint. Versions of transformers differ in whether
    SigLIP has a part named ``vision_model``."""
    name = name.removeprefix("model.")
    part, _, rest = name.partition(".")
    candidates = (name, f"{part}.vision_model.{rest}", f"{part}.{rest.removeprefix('vision_model.')}")
    return next((each for each in candidates if each in state), name)


def _digest(inputs: Mapping[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        _hash(digest, name, tensor)
    return digest.digest()


def _hash(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    """Add a tensor's name, shape, dtype and bytes to a digest."""
    digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
