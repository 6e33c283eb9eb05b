"""A stand-in for TensorRT-LLM, which needs a GPU: the classes that a KV cache connector meets.

Names, arguments and the order of calls are those of NVIDIA/TensorRT-LLM at 3277953 and 035ab91.
"""
