# The targets a newcomer, a developer and CI all use. PYTHON may name another interpreter (3.11 or 3.12).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help train test lint test-gpu sanitize bench bench-ops bench-hf coverage clean

help:
	@echo "make train     set up .venv, then train the default model on the default corpus (ARGS=... adds flags)"
	@echo "make test      set up .venv with the test tools, then run the CPU test suite"
	@echo "make lint      ruff (lint, format) and the type checker"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make sanitize  every kernel on small shapes under compute-sanitizer (on PATH or in CUDA_HOME/bin)"
	@echo "make bench     bench/compare.py: eager, torch.compile and xtrain.compile in one run"
	@echo "make bench-hf  bench/compare_hf.py: transformers' Llama under torch.compile, Liger, xtrain.compile"
	@echo "make coverage  bench/coverage.py: docs/coverage.md anew, half an hour on two cores"
	@echo "make bench-ops bench/report_ops.py: every op against torch, inductor and Liger in one run"

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	$(BIN)/python -m pip install --quiet -r requirements-dev.lock
	@touch $@

train: $(VENV)/.installed
	$(BIN)/python -m xtrain.train --compile --dropout 0.1 $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not gpu" $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu:
	$(PYTHON) -m pytest -m gpu $(ARGS)

sanitize:
	$(PYTHON) tests/ops/sanitize.py

bench: $(VENV)/.installed
	$(BIN)/python bench/compare.py $(ARGS)

bench-hf: $(VENV)/.installed-dev
	$(BIN)/python bench/compare_hf.py $(ARGS)

bench-ops: $(VENV)/.installed
	$(BIN)/python bench/report_ops.py $(ARGS)

coverage: $(VENV)/.installed-dev
	$(BIN)/python bench/coverage.py --jobs 2 $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
