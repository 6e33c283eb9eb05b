"""vLLM, driven from outside: ``tierstore-bench vllm``, and what the tests run engines with.

Nothing here imports vLLM but ``child.py``, which is an engine in a process of its own. So the benchmark can
say in a sentence that vLLM is missing, and an engine that dies takes nobody with it.
"""
