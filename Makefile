.PHONY: help serve test test-all check bench
PYTHON ?= python3
BIN := .venv/bin

help:  ## Show what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --group dev
	touch $@

serve: .venv/installed  ## Serve the demo model on 127.0.0.1:8080 (MODEL=... for another one)
	@exec $(BIN)/mlx-cb serve $(or $(MODEL),demo)

test: .venv/dev  ## Run the checks and the quick tests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	$(BIN)/python -m pytest

test-all: .venv/dev  ## Run every test, the slow ones too
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	$(BIN)/python -m pytest -m "slow or not slow"

check: .venv/dev  ## Run ruff, mypy and the architecture test
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: .venv/dev  ## Measure against mlx_lm.server in one interleaved run, with the gates of our goals
	$(BIN)/mlx-cb bench suite --json artifacts/bench.json --html artifacts/bench.html
