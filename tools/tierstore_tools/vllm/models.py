"""Make small random models for vLLM in seconds, without a download.

``python -m tierstore_tools.vllm.models KIND DIR``. The weights have a fixed seed and a spread of 0.2, which
makes logits differ clearly. The usual 0.02 gives a nearly flat distribution, which hides wrong KV. The
tokenizer is byte-level, without merges: one token per byte, and a few special tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore.errors import TierStoreError, UsageError

VOCAB = 320
PRINTABLE = 94  # token ids below are printable ASCII, one character each
_SEED = 20261121
_POSITIONS = 131_072
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": _POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def llama(**changes: Any) -> Any:
    """Return a Llama of 4 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**BASE, **changes}))


def _small() -> Any:
    """Return a Llama of 26 M parameters: prefill costs far more than an engine's own work per step."""
    return llama(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.05,
    )


def _wide() -> Any:
    """Return a Llama that spends little of its time on attention."""
    return llama(hidden_size=512, intermediate_size=8192, initializer_range=0.05)


def _text(model: Any) -> Any:
    """Limit the answers to printable ASCII: every token is text that a server can send."""
    model.lm_head.weight.data[PRINTABLE:] = 0
    return model


_KINDS: dict[str, Callable[[], Any]] = {
    "tiny": llama,
    "tiny-text": lambda: _text(llama()),
    "small": _small,
    "wide": _wide,
    "small-text": lambda: _text(_small()),
}
KINDS = tuple(_KINDS)


def make(kind: str, directory: Path) -> Path:
    """Make the model ``kind`` in ``directory`` in a new process, unless it exists. Return the directory.

    Raises :class:`UsageError` for an unknown kind, and :class:`TierStoreError` if the process fails.
    """
    if kind not in _KINDS:
        raise UsageError(f"unknown model {kind!r} (known: {', '.join(KINDS)})")
    return make_with("tierstore_tools.vllm.models", kind, directory)


def make_with(module: str, kind: str, directory: Path) -> Path:
    """Run ``python -m module kind directory`` unless the directory has a model. Raises
    :class:`TierStoreError`."""
    if not (directory / "config.json").exists():
        command = [sys.executable, "-m", module, kind, str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise TierStoreError(f"making the model {kind} failed: {last}")
    return directory


def write(
    make_model: Callable[[], Any], directory: Path, *, more: Callable[[Path], None] | None = None
) -> None:
    """Make a model with the fixed seed and write it to ``directory``, with the files that ``more`` adds."""
    import torch

    torch.manual_seed(_SEED)
    model = make_model().float()
    for name, parameter in model.named_parameters():
        # random values, because a missing norm would not be noticed if all values were ones or zeros
        if "norm" in name and parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    partial = directory.with_name(f"{directory.name}.partial")
    model.save_pretrained(partial)
    _write_tokenizer(partial)
    if more is not None:
        more(partial)
    # the directory is renamed in one step, so that an existing directory is always complete
    partial.rename(directory)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<bos>", "<eos>", "<pad>", "<image>"]
    names = [
        *letters,
        *specials,
        *(f"<unused{number}>" for number in range(VOCAB - len(letters) - len(specials))),
    ]
    tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": _POSITIONS,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(_KINDS[sys.argv[1]], Path(sys.argv[2]))
