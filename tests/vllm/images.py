"""One engine that is asked about images or sounds: ``python -m tests.vllm.images MODEL OPTIONS ASKS`` prints
what came of each ask, as JSON lines, and then waits until its input ends.

``OPTIONS`` are those of ``vllm.LLM``. An ask is ``[shade, name, expected]``: the image has one grey (the
sound one loudness), ``name`` is the client's ``multi_modal_uuids`` (null: none), and with ``expected`` it is
asked until so many tokens are a hit. The input comes first, and the same text follows it. A line has the
tokens of the prompt that came from the store, the inputs that the encoder has computed since the engine's
start, and the token of the answer with its log-probability. An engine that only encodes has no answer.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tests.vllm.models import prompt
from tests.vllm.recipes import MEDIUM_TOKEN

_MODULES = {
    "LlavaForConditionalGeneration": "llava",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
}
_TRIES = 200
_encoded: list[object] = []


def _import_torchvision() -> None:
    """Make torchvision importable, which processors of images need. Its own operators need CUDA's torch, so
    `make test-vllm` installs it beside the environment, for these tests only."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(Path(sys.prefix) / "torchvision"))
    import torchvision

    torchvision.tierstore_library = library  # or the definitions go with it


def _register(architecture: str) -> None:
    """Have vLLM know a model, and count what its encoder computes. vLLM would import the model's file in
    another process, without torchvision."""
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    module = importlib.import_module(f"vllm.model_executor.models.{_MODULES[architecture]}")
    model = getattr(module, architecture)
    encode = model.embed_multimodal

    def counted(self: object, **inputs: object) -> object:
        found = encode(self, **inputs)
        _encoded.extend(found)
        return found

    model.embed_multimodal = counted
    ModelRegistry.register_model(architecture, model)

    load = DummyModelLoader.load_weights

    def spread(self: object, model: object, config: object) -> None:
        load(self, model, config)
        for weights in model.parameters():
            weights.data.mul_(300.0)  # vLLM's are so small that every token is equally likely

    DummyModelLoader.load_weights = spread


def _medium(modality: str, shade: int) -> object:
    if modality == "audio":
        import numpy as np

        return shade / 256 * np.sin(np.arange(9600) / 9), 16000
    from PIL import Image

    return Image.new("RGB", (112, 112), (shade, shade, shade))


def main(model: str, options: str, asks: str) -> None:
    _import_torchvision()
    from vllm import LLM, SamplingParams
    from vllm.config import ECTransferConfig

    [architecture] = json.loads((Path(model) / "config.json").read_text())["architectures"]
    _register(architecture)
    modality = "audio" if "Audio" in architecture else "image"
    arguments = json.loads(options)
    if "ec_transfer_config" in arguments:
        arguments["ec_transfer_config"] = ECTransferConfig(**arguments["ec_transfer_config"])
    llm = LLM(
        model=model,
        load_format="dummy",  # transformers 5 calls CLIP's weights by other names than vLLM 0.32
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        block_size=32,
        num_gpu_blocks_override=256,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0, modality: 1},
        **arguments,
    )
    _encoded.clear()  # those of vLLM's own trial
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
    for shade, name, expected in json.loads(asks):
        asked = {
            "prompt_token_ids": [MEDIUM_TOKEN, *prompt(700)],
            "multi_modal_data": {modality: _medium(modality, shade)},
        }
        if name is not None:
            asked["multi_modal_uuids"] = {modality: [name]}
        for _ in range(_TRIES):
            llm.reset_prefix_cache()
            [answer] = llm.generate([asked], params, use_tqdm=False)
            tokens = answer.num_cached_tokens or 0
            if expected is None or tokens == expected:
                break
        output = answer.outputs[0]
        chosen = [(token, output.logprobs[0][token].logprob) for token in output.token_ids]
        line = [tokens, len(_encoded), *chosen]
        sys.stdout.write(f"found {json.dumps(line)}\n")
        sys.stdout.flush()
    sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
