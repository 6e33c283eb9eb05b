"""One engine that is asked about images: ``python -m tests.vllm.images MODEL OPTIONS ASKS`` prints what came
of each ask, as JSON lines, and then waits until its input ends.

``OPTIONS`` are those of ``vllm.LLM``. An ask is ``[shade, name, expected]``: the image has one grey, ``name``
is the client's ``multi_modal_uuids`` (null: none), and with ``expected`` it is asked until so many tokens are
a hit. The image comes first, and the same text follows it. A line has the tokens of the prompt that came from
the store, the images that the encoder has computed since the engine's start, and the token of the answer with
its log-probability. An engine that only encodes has no answer.
"""

from __future__ import annotations

import json
import sys
import types

from tests.vllm.models import prompt
from tests.vllm.recipes import IMAGE_TOKEN

_TRIES = 200
_encoded: list[object] = []


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def _register_llava() -> None:
    """Have vLLM know LLaVA without torchvision, which has no build for processors that fits torch's. Its file
    imports Pixtral's image processor, and with it torchvision, and uses neither here."""
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():  # the answer is kept: nothing else takes the module for the real one
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            module = sys.modules[name] = types.ModuleType(name)
            module.__getattr__ = _anything
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    encode = LlavaForConditionalGeneration.embed_multimodal

    def counted(self: object, **inputs: object) -> object:
        found = encode(self, **inputs)
        _encoded.extend(found)
        return found

    LlavaForConditionalGeneration.embed_multimodal = counted
    ModelRegistry.register_model("LlavaForConditionalGeneration", LlavaForConditionalGeneration)

    load = DummyModelLoader.load_weights

    def spread(self: object, model: object, config: object) -> None:
        load(self, model, config)
        for weights in model.parameters():
            weights.data.mul_(300.0)  # vLLM's are so small that every token is equally likely

    DummyModelLoader.load_weights = spread
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        if getattr(sys.modules[name], "__spec__", None) is None:
            del sys.modules[name]


def main(model: str, options: str, asks: str) -> None:
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.config import ECTransferConfig

    _register_llava()
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
        limit_mm_per_prompt={"image": 1},
        **arguments,
    )
    _encoded.clear()  # those of vLLM's own trial
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
    for shade, name, expected in json.loads(asks):
        asked = {
            "prompt_token_ids": [IMAGE_TOKEN, *prompt(700)],
            "multi_modal_data": {"image": Image.new("RGB", (56, 56), (shade, shade, shade))},
        }
        if name is not None:
            asked["multi_modal_uuids"] = {"image": [name]}
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
