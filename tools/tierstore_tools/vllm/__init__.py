"""``tierstore-bench vllm``, and the vLLM engines of the tests.

Only ``child.py`` imports vLLM. It is an engine in a process of its own, so an engine that dies does not end
the benchmark, and a missing vLLM is one line.
"""
