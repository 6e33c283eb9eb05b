"""A storage backend for SGLang's HiCache, with pages in a tierstore daemon (docs/sglang.md).

The class is in ``tierstore_connectors.sglang.backend``. Importing this package alone does not need SGLang.
"""
