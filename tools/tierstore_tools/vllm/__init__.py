"""``tierstore-bench vllm``, and the vLLM engines of the tests.

Only ``child.py`` imports vLLM. Each engine has a process of its own. An engine that dies therefore does not
end the benchmark, and a missing vLLM is reported in one line.
"""
