# `make reproduce` draws the main figures, `make signal` those of models at initialisation with their theory, and `make test` runs
# the tests. Each target sets up the environment by itself.
#   PYTHON=python3.12       the Python to set up with
#   VENV=.venv              where the environment goes; make rebuilds it whenever requirements.lock changes
#   WORKERS=2               how many processes run the tests
#   ARGS="-k norms -n 0"    more arguments for pytest
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
pythons := 3.11 3.12 3.13
bin := $(VENV)/bin

.PHONY: reproduce signal test lint types docs docs-check lock

reproduce: $(VENV)/ready
	@$(bin)/normflax reproduce depth_stability

signal: $(VENV)/ready
	@$(bin)/normflax reproduce signal

test: $(VENV)/ready
	@$(bin)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

lint: $(VENV)/ready
	@$(bin)/ruff check .

types: $(VENV)/ready
	@$(bin)/pyright --pythonpath $(bin)/python

docs: $(VENV)/ready
	@$(bin)/python scripts/docs

docs-check: $(VENV)/ready
	@$(bin)/python scripts/docs --check

lock:
	@uv pip compile --quiet --universal --python-version $(firstword $(pythons)) --generate-hashes --no-emit-index-url \
	  --no-annotate --custom-compile-command "make lock" --extra dev pyproject.toml --output-file requirements.lock

# Two steps, so that a change of pyproject.toml takes seconds. Each ends with its file, so an interrupted one starts anew.
version = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

$(VENV)/installed: requirements.lock
	$(if $(filter $(pythons),$(version)),,$(error normflax needs Python 3.11, 3.12 or 3.13 and "$(PYTHON)" is $(or $(version),no working Python); name another one, as in: make $(MAKECMDGOALS) PYTHON=python3.12))
	@echo "Setting up the environment in $(VENV), which takes some minutes the first time."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(bin)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

$(VENV)/ready: $(VENV)/installed pyproject.toml
	@$(bin)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
