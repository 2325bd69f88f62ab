# Seven words: run, test, check, soak, gpu, bench, docs. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 7860
RUNS ?= runs

.PHONY: setup run test check soak gpu bench docs tools

setup: $(VENV)/ready  ## a virtual environment with everything, from constraints.txt

# torch first and exactly: a free range would take a build with gigabytes of CUDA on a machine without a GPU.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

run: setup  ## the page, ready to train the default model
	$(BIN)/python -m backend.train.builtin_models smollm2-135m-instruct
	$(BIN)/python -m webui --host $(HOST) --port $(PORT) --runs $(RUNS)

check: setup  ## linter, types and the quick tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	tests/js/check.sh
	$(BIN)/pytest tests/test_floors.py tests/test_docs.py tests/unit

test: setup tools  ## everything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	tests/js/check.sh
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone and not soak and not gpu"
	$(BIN)/pytest -m "alone and not soak and not gpu"

soak: setup tools  ## the long proofs
	$(BIN)/pytest -m soak

gpu: setup tools  ## the proofs on NVIDIA GPUs, one or more; writes docs/gpu.md
	$(BIN)/pytest -m gpu -rs

bench: setup tools  ## timings, printed as tables
	$(BIN)/python -m tests.bench

docs: setup  ## what is generated: docs/options.md, docs/rules.md
	$(BIN)/python -m backend docs

# What tests need of Debian: a browser; a compiler and libaio, since DeepSpeed builds parts of itself on first use.
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
tools:
	@command -v chromium >/dev/null || $(ROOT) apt-get install -y chromium
	@command -v c++ >/dev/null || $(ROOT) apt-get install -y g++
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" || \
		$(ROOT) apt-get install -y python3-dev
	@test -e /usr/include/libaio.h || $(ROOT) apt-get install -y libaio-dev
