# `make` prints what can be made.

# The first Python on the path that is new enough; name another with make PYTHON=…
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
# Options for pip, for example an index that has CPU-only wheels of torch.
PIP_ARGS ?=
# Options for pytest, for example PYTEST_ARGS="-k config -x".
PYTEST_ARGS ?=

# A whole Triton server for one test. Without its dependencies: it wants an older NumPy, and the
# test starts the server alone.
TRITON := nvidia-pytriton==0.7.0

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint format notebook docs clean

help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo ## install what the demo needs and run it on MiniLM and retrieval
	$(BIN)/qbench run configs/demo.yaml

test: $(VENV)/.installed-dev ## install what the tests need; lint, check types, run all tests
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebook: $(VENV)/.installed-notebook ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

docs: $(VENV)/.installed-dev ## write docs/cli.md and docs/backends.md from the code
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_backends.py

clean: ## remove the environment and caches; results and prepared data stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './results/*' -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: qbench needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: EXTRAS = cpu,demo
$(VENV)/.installed-dev: EXTRAS = cpu,demo,dev,ray,serve,triton,tensorrt-rtx
$(VENV)/.installed-notebook: EXTRAS = cpu,demo,notebook
$(VENV)/.installed-%: $(PINS) | $(BIN)/python
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
	$(if $(filter triton,$(subst $(comma), ,$(EXTRAS))),$(PIP) install $(PIP_ARGS) --no-deps $(TRITON) || echo "no Triton server for this platform: its test is skipped" >&2)
	@touch $@
