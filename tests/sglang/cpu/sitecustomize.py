"""Makes SGLang's hierarchical cache and its engine run without a GPU. This folder is on ``PYTHONPATH`` for
the tests of ``make test-sglang``, so every process of theirs begins with this module; nothing of SGLang is
edited.

It replaces what exists for CUDA only: the registration of host memory, pinned memory, and the copies between
a device's pool and the host's, here by indexing. Each waits until the module that it is about has been
imported."""

import importlib.abc
import importlib.machinery
import sys

_HOST_POOLS = "sglang.srt.mem_cache.pool_host."


def _torch(torch):
    library = torch.library.Library("torchvision", "DEF")  # torchvision's own part needs CUDA's torch
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.tierstore_library = library  # or the definitions go with it

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, nbytes, flags):
            return 0

        @staticmethod
        def cudaHostUnregister(address):
            return 0

        @staticmethod
        def cudaGetErrorString(code):
            return f"error {code}"

    torch.cuda.cudart = lambda: Runtime
    torch.cpu.Stream.synchronize = lambda self: None
    torch.Tensor.pin_memory = lambda self, *_: self
    for name in ("empty", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(make):
    def made(*sizes, pin_memory=False, **options):
        return make(*sizes, **options)

    return made


class _UnpinnedTorch:
    """PyTorch, for a module that makes pinned tensors."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        return getattr(self._torch, name)

    def tensor(self, *values, pin_memory=False, **options):
        return self._torch.tensor(*values, **options)


def _lora(module):
    module.torch = _UnpinnedTorch(module.torch)


def _per_layer(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=False):
        target[dst_indices] = source[src_indices]


def _layer_from_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    for source, target in zip(src_ptrs, dst_ptrs, strict=False):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def _layers_to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[number * layers + layer]
            target[dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]


def _host_pool(module):
    module.transfer_kv_direct = _per_layer
    module.transfer_kv_per_layer_direct_pf_lf = _layer_from_pages
    module.transfer_kv_all_layer_direct_lf_pf = _layers_to_pages


def _host_memory(module):
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 256 << 20  # SGLang leaves 10 GiB free, or does not start


_AFTER = {"torch": _torch, f"{_HOST_POOLS}base": _host_memory}
_AFTER |= {f"sglang.srt.lora.{name}": _lora for name in ("layers", "mem_pool", "backend.torch_backend")}
_AFTER |= {f"{_HOST_POOLS}{name}": _host_pool for name in ("mha", "mla", "mamba", "dsa")}


class _Loader(importlib.abc.Loader):
    """Another's, and then something for the module."""

    def __init__(self, loader, then):
        self._loader = loader
        self._then = then

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, _AFTER[name])
        return spec


sys.meta_path.insert(0, _Finder())
