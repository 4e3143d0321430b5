# Every target makes its own environment in .venv; the stamp file makes repeats fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-backends lint bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, '$(PYTHON)' is not: make PYTHON=/path/to/python3" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 cannot make virtual environments here: install its venv package" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## plan, quantize, verify and run the checkpoint in examples/
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

test-all: $(STAMP)  ## all tests, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --slow

test-backends: $(STAMP)  ## the tests that need AutoRound, ModelOpt and llm-compressor (installs them)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,all]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --slow tests/backends tests/conversion

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## speed, memory and quality against peers (installs them)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

clean:  ## remove caches and demo output, keep .venv
	rm -rf demo-out bench-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
