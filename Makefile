# Works from a bare clone with Python 3.11 (with a GPU: to 3.13) and pip: every target that needs it runs `make setup`.
SHELL := /bin/bash
.DEFAULT_GOAL := help

ifeq ($(origin PYTHON),undefined)
# With SPAC_SITE=system, the machine's own Python, which has vLLM and torch; .ci/bootstrap.py checks the versions.
PYTHONS := $(if $(filter system,$(SPAC_SITE)),python3 python,python3.11 python3.12 python3.13 python3)
PYTHON := $(shell for p in $(PYTHONS); do \
	$$p -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit(1); print(sys.executable)' 2>/dev/null \
	&& break; done)
endif
BIN := .venv/bin
# Not `python -m pytest`: that would put the checkout, and with it the folder triton_kernels, on sys.path.
PYTEST := $(BIN)/pytest

# Tests that start engines take one core each, and 3 GB. Where pytest-xdist is missing (SPAC_SITE=system), one after another.
# Whole files, in the order of tests/conftest.py.
JOBS ?= 2
PARALLEL = $(if $(wildcard .venv/lib/python*/site-packages/xdist),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

# vLLM's V2 runner on a CPU, see tests/v2_on_cpu.
V2 := PYTHONPATH=$(CURDIR)/tests/v2_on_cpu VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 TORCH_COMPILE_DISABLE=1

# Only these are collected: what other tests import, a GPU machine may lack.
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)

.PHONY: help setup demo demo-cluster test test-rest test-changed test-full test-v2 test-gpu test-gpu-full soak lock families compat recipes results results-timed docs
.PHONY: bench bench-gpu bench-gpu-full check clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## install everything into .venv (minutes the first time; SPAC_DEVICE=cpu|gpu, SPAC_SITE=system: use this Python's vLLM)
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: none of $(PYTHONS) is a Python 3.11 to 3.13; install 3.11 or run make PYTHON=/path/to/python3.11" >&2; \
		exit 1; fi
	@$(PYTHON) .ci/bootstrap.py
	@$(PYTHON) benchmarks/toy/stored.py

demo: setup ## ask a small carved MoE with a quarter of its experts in RAM, and compare with stock vLLM (downloads 93 MB once)
	@$(BIN)/python benchmarks/demo.py

demo-cluster: setup ## serve it from three expert workers, kill one on the way, and compare with stock vLLM
	@$(BIN)/python benchmarks/demo_cluster.py

test: setup ## every unit, contract and property test and some engines, two at a time (JOBS=N): at most ten minutes
	@$(PYTEST) $(PARALLEL) -m "not rest and not full and not gpu" -rs

test-rest: setup ## what `test` leaves out and CI runs too: more engines and kernels, both runners, all drawn examples
	@SPAC_TESTS=thorough $(PYTEST) $(PARALLEL) -m "(rest or hypothesis) and not full and not gpu" -rs
	@SPAC_TESTS=thorough $(V2) $(PYTEST) $(PARALLEL) -m "v2 and not full" -rs tests/parity

test-full: setup ## all tests that need no GPU, also the slow ones
	@SPAC_TESTS=thorough $(PYTEST) $(PARALLEL) -m "not gpu" -rs
	@$(MAKE) --no-print-directory test-v2

test-changed: setup ## only what a change reaches by imports (BASE=commit to compare with, FAR=imports to follow: 3)
	@files=$$($(BIN)/python tests/unit/changed.py $(if $(BASE),--base $(BASE)) $(if $(FAR),--far $(FAR))) || exit 1; \
		[ -z "$$files" ] && echo "nothing has changed" || $(PYTEST) $(PARALLEL) -m "not full and not gpu" -rs $$files

test-v2: setup ## the engine tests with vLLM's V2 runner, a GPU's default, on this CPU: some 25 minutes
	@$(V2) $(PYTEST) $(PARALLEL) -m "not gpu and (v2 or not full)" -rs tests/parity

test-gpu: setup ## the tests that need a CUDA device, with three engines: some minutes
	@$(PYTEST) -m "gpu and not full" -rs $(GPU_TESTS)

test-gpu-full: setup ## the same with both runners, all ways to draft and to reach experts: most of an hour
	@$(PYTEST) -m gpu -rs $(GPU_TESTS)

soak: setup ## 10^5 steps or an hour of mixed requests: stock's tokens, constant memory (SOAK="--steps N --minutes M", RUNNER=v2)
	@$(if $(filter v2,$(RUNNER)),$(V2)) $(BIN)/python tests/soak/soak.py $(SOAK)

lock: setup ## give .ci/constraints.lock the versions of .ci/constraints.txt, and the hashes of their files
	@$(BIN)/uv pip compile --quiet --no-deps --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--output-file .ci/constraints.lock .ci/constraints.txt

families: setup ## try every MoE architecture of this vLLM, stock against the plugin; continues where it stopped (FAMILIES="--again")
	@$(BIN)/python tests/upstream/families.py $(FAMILIES)

compat: setup ## what changed in each wrapped name of a vLLM that is not installed (VLLM=0.34.0; downloads its sources, 13 MB)
	@$(BIN)/python tests/upstream/compat.py $(VLLM)

recipes: setup ## calculate vllm_spac/RECIPES.md again
	@$(BIN)/python benchmarks/recipes.py

results: setup ## make every figure again that is no time, then the documents' tables and numbers: hours
	@$(BIN)/python benchmarks/reproduce.py results

results-timed: setup ## the same for the figures that are times: hours, nothing else may run
	@$(BIN)/python benchmarks/reproduce.py results --timed

docs: setup ## the pages as a searchable site, links checked: .cache/docs/site (DOCS=--serve shows it at 127.0.0.1:8000)
	@$(BIN)/python .ci/docs.py $(DOCS)

bench: setup ## the plugin and stock vLLM on the toy model: tokens first, then speed
	@$(BIN)/python benchmarks/serving/on_gpu.py --batch 1,4 --side spac --side 'spac policy=lru' --side 'spac speculation=eagle3'

bench-gpu: GPU_KERNELS = --short
bench-gpu: GPU_ENGINES = --minutes 15
bench-gpu: bench-gpu-run ## kernels, tokens and times on a GPU, beside plain copies and stock vLLM's own offloading: 20 minutes

bench-gpu-full: GPU_KERNELS =
bench-gpu-full: GPU_ENGINES = --slots 10%,20%,25%,50% --minutes 120
bench-gpu-full: bench-gpu-run ## the same for more sizes, to the end of the table: hours

.PHONY: bench-gpu-run
bench-gpu-run: setup
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("make bench-gpu: needs a CUDA device, and torch sees none")'
	@$(BIN)/python benchmarks/kernels/run.py $(GPU_KERNELS)
	@$(BIN)/python benchmarks/serving/on_gpu.py --at-once 2 $(GPU_ENGINES)

check: setup ## what CI runs: linter, formatting, types, tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python .ci/types.py
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

clean: ## remove .venv and everything that tests, builds and the demo left behind
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .cache/demo .cache/docs .cache/real
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
