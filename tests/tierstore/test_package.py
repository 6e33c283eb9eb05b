from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest


def test_importing_it_imports_neither_torch_nor_cupy():
    code = "import sys, tierstore; print(sorted({'torch', 'cupy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["tierstore", "tierstore.spec"])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed
