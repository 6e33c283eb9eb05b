"""SGLang's HiCache over a tierstore daemon: ``--hicache-storage-backend dynamic`` (docs/sglang.md).

The class is in ``tierstore_connectors.sglang.backend``. Importing this package alone does not need SGLang.
"""
