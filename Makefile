# Targets: run, test, check, soak, gpu, bench, docs. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 7860
RUNS ?= runs

.PHONY: setup run test check soak gpu bench docs tools

setup: $(VENV)/ready  ## a virtual environment with the versions of constraints.txt

# torch first, with its pinned version: an open range could select a build with several gigabytes of CUDA libraries.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

run: setup  ## serves the page; converts the default model first
	$(BIN)/python -m backend.train.builtin_models smollm2-135m-instruct
	$(BIN)/python -m webui --host $(HOST) --port $(PORT) --runs $(RUNS)

check: setup  ## linters, types and unit tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	tests/js/check.sh
	$(BIN)/pytest tests/test_floors.py tests/test_docs.py tests/unit

test: setup tools  ## all tests except soak and gpu
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	tests/js/check.sh
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone and not soak and not gpu"
	$(BIN)/pytest -m "alone and not soak and not gpu"

soak: setup tools  ## long tests; writes docs/strategies.md, checks.md, memory.md
	$(BIN)/pytest -m soak

gpu: setup tools  ## tests on one or more NVIDIA GPUs; writes docs/gpu.md
	$(BIN)/pytest -m gpu -rs

bench: setup tools  ## timings, printed as tables
	$(BIN)/python -m tests.bench

docs: setup  ## writes docs/options.md and docs/rules.md
	$(BIN)/python -m backend docs

# Debian packages that the tests need: a browser; a compiler and libaio, because DeepSpeed builds operators on first use.
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
tools:
	@command -v chromium >/dev/null || $(ROOT) apt-get install -y chromium
	@command -v c++ >/dev/null || $(ROOT) apt-get install -y g++
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" || \
		$(ROOT) apt-get install -y python3-dev
	@test -e /usr/include/libaio.h || $(ROOT) apt-get install -y libaio-dev
