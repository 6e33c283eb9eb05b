"""SGLang's HiCache over a tierstore daemon: ``--hicache-storage-backend dynamic`` (docs/sglang.md).

Import ``tierstore_connectors.sglang.backend`` for the class itself, which needs SGLang; nothing else here
does."""
