"""In the place of SGLang's kernels, whose wheels are for CUDA: every name can be imported, and none can be
called."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Kernel:
    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")

    def __call__(self, *arguments, **options):
        raise NotImplementedError(f"{self.__name__} needs a GPU")


def _kernel_of(module):
    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{module}.{name}")

    return get


__getattr__ = _kernel_of(__name__)


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _kernel_of(spec.name)
        return module

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, _Modules())
