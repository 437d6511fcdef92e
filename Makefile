# Works from a bare clone with Python 3.11 and pip: every target that needs it runs `make setup` first.
SHELL := /bin/bash
.DEFAULT_GOAL := help

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit(1); print(sys.executable)' 2>/dev/null && break; done)
endif
BIN := .venv/bin
# Not `python -m pytest`: that would put the checkout, and with it the folder triton_kernels, on sys.path.
PYTEST := $(BIN)/pytest

# The toy model with the experts of a published one.
LARGE_LIKE := qwen3-30b-a3b
LARGE := .cache/toy/$(LARGE_LIKE)

.PHONY: help setup demo test test-full test-gpu bench bench-gpu check clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## install everything into .venv (a few minutes the first time; SPAC_DEVICE=cpu|gpu overrides the detection)
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: Python 3.11 is needed and neither python3.11 nor python3 is one; install it or say make PYTHON=/path/to/python3.11" >&2; \
		exit 1; fi
	@$(PYTHON) .ci/bootstrap.py

demo: setup ## serve a toy model with a quarter of its experts in fast memory and compare with stock vLLM
	@$(BIN)/python benchmarks/demo.py

test: setup ## unit, property and contract tests and the short engine tests
	@$(PYTEST) -m "not full and not gpu" -rs

test-full: setup ## all tests that need no GPU, also the slow ones
	@$(PYTEST) -m "not gpu" -rs

test-gpu: setup ## the tests that need a CUDA device
	@$(PYTEST) -m gpu -rs

bench: setup ## the plugin beside stock vLLM on the toy model: tokens first, then speed
	@$(BIN)/python benchmarks/serving/run.py

bench-gpu: setup ## kernels and serving on a GPU, beside plain copies and stock vLLM's own offloading
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("make bench-gpu: needs a CUDA device, and torch sees none")'
	@$(BIN)/python benchmarks/kernels/run.py
	@$(BIN)/python benchmarks/toy/inflate.py benchmarks/toy/models/target $(LARGE) --like $(LARGE_LIKE) --eagle3 benchmarks/toy/models/eagle3
	@$(BIN)/python benchmarks/serving/run.py $(LARGE) --eagle3 $(LARGE)-eagle3 --slots 10%,25%,50% --policy reuse,reuse+pointers \
		--offload uva,prefetch --speculation none,eagle3 --compile --store host

check: setup ## what CI runs: linter, formatting, tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory test

clean: ## remove .venv and everything that tests, builds and the demo left behind
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .cache/demo
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
