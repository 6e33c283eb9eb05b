"""LoRA adapters, as PEFT writes them: small matrices that are added to a model's own.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. For a matrix ``W`` of
the model, the adapter has matrices ``A`` and ``B`` of a low rank, and the layer computes with ``W + scale × B
A``. ``B A`` is never computed: rows of a step that belong to an adapter are also multiplied by ``A`` and then
by ``B``. Sequences with different adapters, or without an adapter, can therefore share a step.

KV depends on the adapter. The identity of pages contains the SHA-256 of the adapter's two files, and not its
name. A renamed adapter therefore finds its pages, and a changed one does not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from tierstore.errors import SpecError, UsageError
from tierstore.spec import read_json
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.layer_weights import ExpertsWeights, LayerWeights, ModelWeights
from tierstore_engine.quantised import AdaptedMatrix, AdapterRows, LowRank, Matrix
from tierstore_engine.weight_slots import Slot, slots
from tierstore_engine.weights import meta_weights, stored_name

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# Fields that do not change what a trained adapter computes, or that are read here.
_HARMLESS = (
    "alpha_pattern auto_mapping base_model_name_or_path exclude_modules inference_mode init_lora_weights "
    "layers_pattern layers_to_transform lora_alpha lora_dropout megatron_core peft_type peft_version "
    "qalora_group_size r rank_pattern revision target_modules task_type use_rslora"
)
# other values change the model's own weights
_EXACT_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")
_TEXT_PART = re.compile(r"^(model\.language_model|language_model\.model|backbone)\.")

# The matrices of a layer that are only multiplied with activations.
_MULTIPLIED = (
    "qkv",
    "o",
    "q_down",
    "q",
    "kv_down",
    "qkvz",
    "ba",
    "projection",
    "selection",
    "steps",
    "gate_up",
    "down",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix of a layer. ``part`` is ``mixer``, ``mlp`` or ``shared`` (the expert that computes all
    tokens), and ``field`` is the matrix's name in that part."""

    layer: int
    part: str
    field: str


@dataclass(frozen=True)
class Adapter:
    """An adapter with the ``name`` by which requests choose it. ``digest`` is made from its contents.
    ``changes`` are in the model's dtype, on the CPU."""

    name: str
    digest: str
    changes: Mapping[Place, Sequence[LowRank]]


def read_adapters(config: ModelConfig, given: Sequence[str]) -> tuple[Adapter, ...]:
    """Return the adapters of ``NAME=DIR`` arguments for a model.

    Raises :class:`UsageError` for an argument of another form and for a name that was given twice, and
    :class:`ModelError` for a folder that is not an adapter of this model, or that cannot be computed exactly.
    """
    found: dict[str, Adapter] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not (name and equals and folder):
            raise UsageError(f"--adapter takes NAME=DIR, got {each!r}")
        if name in found:
            raise UsageError(f"--adapter names {name!r} twice: give each adapter its own name")
        found[name] = read_adapter(config, Path(folder), name)
    return tuple(found.values())


def read_adapter(config: ModelConfig, folder: Path, name: str) -> Adapter:
    """Return the adapter in a folder. Raises :class:`ModelError` like :func:`read_adapters`."""
    raw, settings, tensors, digest = _read(folder)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise ModelError(f"{raw}: tensor {key} is not a lora_A or lora_B of a linear layer")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    if not pairs:
        raise ModelError(f"{raw} has no tensor")
    modules = _modules(config)
    changes: dict[Place, list[LowRank]] = {}
    for module, sides in sorted(pairs.items()):
        if len(sides) != 2:
            raise ModelError(f"{raw}: {module} lacks {'lora_A' if 'B' in sides else 'lora_B'}")
        targets = modules.get(_TEXT_PART.sub("model.", module))
        if targets is None:
            raise ModelError(
                f"{raw}: {module} is not a layer of this model that adapters are computed for: attention, "
                "other mixers and plain MLPs are, outside of blocks that layers share"
            )
        down, up = _scaled(raw, module, settings, sides)
        for target in targets:
            changes.setdefault(target.place, []).append(target.change(raw, module, down, up, config))
    return Adapter(name, digest, changes)


def adapted(
    weights: ModelWeights, adapters: Sequence[Adapter], rows: AdapterRows, device: str
) -> ModelWeights:
    """Return the model's weights together with the adapters' weights, which apply to the rows that ``rows``
    names."""
    by_place: dict[Place, dict[str, Sequence[LowRank]]] = {}
    for adapter in adapters:
        for place, changes in adapter.changes.items():
            by_place.setdefault(place, {})[adapter.digest] = [each.on(device) for each in changes]
    layers = list(weights.layers)
    for place, changes_of in by_place.items():
        layer = layers[place.layer]
        part = _part(layer, place.part)
        matrix = AdaptedMatrix(getattr(part, place.field), changes_of, rows)
        layers[place.layer] = _with_part(layer, place.part, replace(part, **{place.field: matrix}))
    return replace(weights, layers=tuple(layers))


def _part(layer: LayerWeights, name: str) -> Any:
    if name != "shared":
        return layer.mixer if name == "mixer" else layer.mlp
    return layer.mlp.shared if isinstance(layer.mlp, ExpertsWeights) else None


def _with_part(layer: LayerWeights, name: str, part: Any) -> LayerWeights:
    if name != "shared":
        return replace(layer, **{name: part})
    assert isinstance(layer.mlp, ExpertsWeights)
    return replace(layer, mlp=replace(layer.mlp, shared=part))


# -- the layers of a model -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """The rows of a matrix that one linear layer of the checkpoint fills."""

    place: Place
    slot: Slot
    first: int

    def change(
        self, file: Path, module: str, down: torch.Tensor, up: torch.Tensor, config: ModelConfig
    ) -> LowRank:
        """Return the change of these rows. ``up`` is the matrix B of the whole layer."""
        shape, members, rank = self.slot.tensor.shape, self.slot.members, len(down)
        columns, rows = shape[-1], shape[0] if members is None else shape[0] * members[2] * shape[2]
        if down.shape != (rank, columns) or up.shape != (rows, rank):
            raise ModelError(
                f"{file}: {module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, but the layer "
                f"takes {columns} numbers and yields {rows}"
            )
        if members is not None:
            first, stop, total = members
            up = up.view(shape[0], total, shape[2], rank)[:, first:stop].reshape(-1, rank)
        dtype: torch.dtype = getattr(torch, config.dtype)
        return LowRank(self.first, down.to(dtype).contiguous(), up.to(dtype).contiguous())


def _modules(config: ModelConfig) -> Mapping[str, Sequence[_Target]]:
    """Return the linear layers of a model that adapters may change, by their names in a checkpoint."""
    weights = meta_weights(config)
    places = {id(matrix): place for place, matrix in _matrices(weights)}
    found: dict[str, list[_Target]] = {}
    for slot in slots(config, weights):
        tensor = slot.tensor
        assert isinstance(tensor, torch.Tensor)
        whole = tensor if tensor._base is None else tensor._base
        place = places.get(id(whole))
        if place is not None and slot.name.endswith(".weight"):
            name = stored_name(config, slot.name).removesuffix(".weight")
            first = tensor.storage_offset() // whole.shape[-1]
            found.setdefault(_TEXT_PART.sub("model.", name), []).append(_Target(place, slot, first))
    return found


def _matrices(weights: ModelWeights) -> Iterator[tuple[Place, Matrix]]:
    for number, layer in enumerate(weights.layers):
        for name in ("mixer", "mlp", "shared"):
            part = _part(layer, name)
            if part is None or isinstance(part, ExpertsWeights):
                continue
            for field in fields(part):
                if field.name in _MULTIPLIED and getattr(part, field.name) is not None:
                    yield Place(number, name, field.name), getattr(part, field.name)


# -- the files -----------------------------------------------------------------------------------------


def _read(folder: Path) -> tuple[Path, Mapping[str, Any], Mapping[str, torch.Tensor], str]:
    """Return the file of tensors, the checked configuration, the tensors, and the digest of both files."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} is not a LoRA adapter: it has no {name}")
    file = folder / WEIGHTS_FILE
    try:
        settings = read_json(folder / CONFIG_FILE)
        text, data = (folder / CONFIG_FILE).read_bytes(), file.read_bytes()
        tensors = load_tensors(data)
    except SpecError as error:
        raise ModelError(str(error)) from error
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    _check(folder / CONFIG_FILE, settings)
    digest = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest())
    return file, settings, tensors, digest.hexdigest()


def _check(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise :class:`ModelError` for a configuration that needs anything else than the two matrices."""
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type must be LORA, got {settings.get('peft_type')!r}")
    if settings.get("bias", "none") != "none":
        raise ModelError(f"{file}: bias {settings['bias']!r} is not supported (only none)")
    if settings.get("init_lora_weights") not in _EXACT_STARTS:
        raise ModelError(
            f"{file}: init_lora_weights {settings['init_lora_weights']!r} is not supported: it changes the "
            "model's own weights"
        )
    for name, value in settings.items():
        if value and name != "bias" and name not in _HARMLESS.split():
            raise ModelError(f"{file}: {name} is not supported, got {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(name) or {}, Mapping):
            raise ModelError(f"{file}: {name} must be an object, got {settings[name]!r}")


def _scaled(
    file: Path, module: str, settings: Mapping[str, Any], sides: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A, and B times the scale, in float32."""
    down, up = sides["A"], sides["B"]
    rank = _of_module(settings, "rank_pattern", "r", module)
    alpha = _of_module(settings, "alpha_pattern", "lora_alpha", module)
    if down.dim() != 2 or up.dim() != 2 or len(down) != rank:
        raise ModelError(
            f"{file}: {module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, but its rank is "
            f"{rank:g}"
        )
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return down.float(), up.float() * scale


def _of_module(settings: Mapping[str, Any], patterns: str, field: str, module: str) -> float:
    """Return the value for the first pattern with which a module's name ends, or the common value if no
    pattern fits."""
    value = settings.get(field)
    for pattern, other in (settings.get(patterns) or {}).items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise ModelError(f"{CONFIG_FILE}: {patterns} has {pattern!r}: {error}") from error
        if matches:
            field, value = f"{patterns} {pattern}", other
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{CONFIG_FILE}: {field} must be a positive number, got {value!r}")
    return value
