# Targets: run, test, check, soak, soak-cpu, gpu, bench, docs, lock, pictures. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 7860
RUNS ?= runs
ARGS ?=

# make test CPU=avx2 THREADS=2: the kernels of another x86-64 CPU (default, which is SSE4 at most, avx2 or avx512; unset:
# whatever this CPU has), and this many intra-op threads in each training process. tests/conftest.py reads both.
export FOOTPLATE_TEST_CPU := $(CPU)
export FOOTPLATE_TEST_THREADS := $(or $(THREADS),1)

# Some environments forbid compiled modules, so that each of hundreds of processes would compile the project again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: installed setup run test check types javascript soak soak-cpu gpu bench docs lock pictures tools

setup: $(VENV)/compiled  ## a virtual environment with the versions of constraints.txt

# Half of the source text in the packages, which most runs never import.
UNUSED := /(tests|testing|kubernetes|nltk|mypy|pip|fontTools|transformers/models)/

# pip uses one core, so two of them unpack the pinned packages, from the end of the alphabet, where torch is. The last
# command adds what those packages need on this machine, DeepSpeed, which is built with some of them, and this project.
PIP := $(BIN)/pip install --quiet --no-compile --no-build-isolation
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77"
	grep -v '^deepspeed==' constraints.txt | sort -r | xargs -P 2 -n 35 $(PIP) --no-deps
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	touch $@

$(VENV)/compiled: $(VENV)/ready
	-$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib  # pip would use one core; some files are for another Python
	touch $@

installed:  # Python's packages and the system's, at the same time
	@$(MAKE) --no-print-directory -j2 setup tools

run: setup  ## serves the page, with further ARGS such as --no-login; converts the default model first
	$(BIN)/python -m backend.train.builtin_models smollm2-135m-instruct
	$(BIN)/python -m webui --host $(HOST) --port $(PORT) --runs $(RUNS) $(ARGS)

check: types javascript setup  ## linters, types and unit tests
	$(BIN)/pytest tests/test_floors.py tests/test_docs.py tests/unit

types: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

javascript:
	tests/js/check.sh

PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
test:  ## linters, types and all tests except soak and gpu; CPU and THREADS as above
	@$(MAKE) --no-print-directory -j4 setup tools javascript types  # pip uses one core only
	$(BIN)/pytest $(PARALLEL) --durations=40 -m "not soak and not gpu"

soak: installed  ## long tests, or PART of them; writes docs/strategies.md, checks.md, memory.md and others
	$(BIN)/pytest -m soak --durations=10 $(if $(PART),$(or $(wildcard $(PART:%=tests/*/test_%.py) $(PART:%=tests/*/cited/test_%.py)),$(error no test_$(PART).py)))

# The tests that train, with each instruction set that this CPU has and one thread, then with two and four threads.
# Losses must agree within rounding with any of them, not to the last bit.
has = $(shell grep -qw $(1) /proc/cpuinfo && echo $(2))
CPUS = default $(call has,avx2,avx2) $(call has,avx512vl,avx512)
TRAIN := optimizers strategies preference_stages methods quantized precisions training rank0_loading mixture_of_experts \
	loss_labels option_effects reference_loop
soak-cpu: installed  ## the training tests on other CPUs' kernels and with more threads
	@trap 'exit 130' INT; failed=0; \
	for each in $(CPUS:%=%/1) $(lastword $(CPUS))/2 $(lastword $(CPUS))/4; do \
		echo "CPU=$${each%/*} THREADS=$${each#*/}"; \
		FOOTPLATE_TEST_CPU=$${each%/*} FOOTPLATE_TEST_THREADS=$${each#*/} $(BIN)/pytest $(PARALLEL) \
			$(TRAIN:%=tests/process/test_%.py) -m "not soak and not gpu" || failed=1; \
	done; \
	exit $$failed

gpu: installed  ## tests on one or more NVIDIA GPUs; writes docs/gpu.md
	$(BIN)/pytest -m gpu -rs

bench: installed  ## timings, printed as tables
	$(BIN)/python -m tests.bench

docs: setup  ## writes docs/options.md and docs/rules.md
	$(BIN)/python -m backend docs

lock: setup  ## writes backend/environments/vllm.lock from the package index, after a change of VLLM in tests/lock_vllm.py
	$(BIN)/python tests/lock_vllm.py

pictures: installed  ## the screenshots of README and guide; trains the preset First run
	$(BIN)/python tests/browser/pictures.py $(ARGS)

# What the tests need from the system: a browser; a compiler, Python's headers and libaio, because DeepSpeed builds operators
# on first use; and Slurm. A fresh Debian has no package lists until it is updated.
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
HEADERS = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
tools:
	@missing=""; \
	command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || missing="$$missing chromium-headless-shell"; \
	command -v c++ >/dev/null || missing="$$missing g++"; \
	test -e "$(HEADERS)/Python.h" || missing="$$missing python3-dev"; \
	test -e /usr/include/libaio.h || missing="$$missing libaio-dev"; \
	command -v slurmctld >/dev/null || test -e /usr/sbin/slurmctld || missing="$$missing slurm-wlm"; \
	test -n "$$missing" || exit 0; \
	if ! command -v apt-get >/dev/null; then \
		echo "The tests need these Debian packages, and this system has no apt-get:$$missing." >&2; \
		echo "Install what corresponds to them: chromium-headless-shell is the browser, for which chromium is a slower" >&2; \
		echo "replacement; g++ is a C++ compiler named c++, python3-dev provides Python.h for $(PYTHON), libaio-dev" >&2; \
		echo "provides /usr/include/libaio.h, slurm-wlm provides slurmctld and slurmd." >&2; \
		exit 1; \
	fi; \
	$(ROOT) apt-get update && $(ROOT) apt-get install -y --no-install-recommends $$missing
