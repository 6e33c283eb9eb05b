"""What the plug-in does with vLLM's arguments: ``python -m tests.vllm.one_variable MODEL`` takes a JSON list
of cases, ``[[environment, arguments], …]``, and prints the connector of each configuration."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

RESULT = "RESULT "


def main(model: str, cases: list[tuple[dict[str, str], dict[str, Any]]]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    common = {"model": model, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024}
    results = []
    for environment, arguments in cases:
        os.environ.update(environment)
        if "flags" in arguments:  # the command line's way
            parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
            words = [
                "--model",
                model,
                "--skip-tokenizer-init",
                "--max-model-len",
                "1024",
                *arguments["flags"],
            ]
            made = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
        else:
            made = EngineArgs(**common, **arguments)
        config = made.create_engine_config().kv_transfer_config
        results.append(None if config is None else [config.kv_connector, config.kv_connector_extra_config])
    print(RESULT + json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
