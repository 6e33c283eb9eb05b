# Two commands on a fresh machine with Python 3.10+ and nothing else:
#   make bench    the 100K-token benchmark with its defaults
#   make test     lint, types and the test suite
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: bench test lint types suite soak gpu-check clean

bench: $(VENV)/bench.stamp
	$(BIN)/tierstore-bench longctx

test: lint types suite

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

suite: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

soak: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m soak

# On a machine with a GPU: first what the tests without one assume of the hardware, then the same tests on it.
gpu-check: $(VENV)/dev.stamp
	TIERSTORE_KERNEL_DEVICE=cuda $(BIN)/python -m pytest tests/engine/kernels/test_golden.py
	TIERSTORE_KERNEL_DEVICE=cuda $(BIN)/python -m pytest tests/engine/kernels tests/engine/test_cuda_attention.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/bench.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[bench]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
