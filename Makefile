# `make demo` and `make test` need nothing but a Python >= 3.11 and a package index: they set up $(VENV) themselves.
#
#   make demo        train a drafter for a real model on this machine and print what each stage gained
#   make test        the fast tests
#   make test-slow   the slow tests; installs PyTorch (to compare with its implementation of the same models)
#   make lint | types | format | wheel | clean
#
# Variables: PYTHON (python3), VENV (.venv), PYTEST_ARGS, DEMO_ARGS (e.g. "--target tiny"), TORCH (what test-slow installs).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n 2 --dist loadfile
DEMO_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_STAMP := $(VENV)/.installed-torch

# An environment counts only if its last line of set-up was reached, by this interpreter, in this folder, and it still starts.
# Everything else (interrupted install, another PYTHON, moved clone, deleted interpreter) is built again from nothing.
IDENTITY := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) $(CURDIR)
FOUND := $(shell "$(BIN)/python" -c 'import pip' 2>/dev/null && cat "$(STAMP)" 2>/dev/null)
ifneq ($(IDENTITY),$(FOUND))
$(STAMP): FORCE
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint format types wheel clean FORCE

help:
	@sed -n '3,6s/^#   //p' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) must be a Python >= 3.11; name one with PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv --clear "$(VENV)"
	@"$(BIN)/python" -m pip install -qq --editable '.[dev]'
	@"$(BIN)/python" -m pip check
	@printf '%s\n' '$(IDENTITY)' > "$@"

$(TORCH_STAMP): $(STAMP)
	"$(BIN)/python" -m pip install -qq $(TORCH)
	@touch "$@"

demo: $(STAMP)
	"$(BIN)/dstill" demo $(DEMO_ARGS)

test: $(STAMP)
	"$(BIN)/python" -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(TORCH_STAMP)
	"$(BIN)/python" -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMP)
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .

format: $(STAMP)
	"$(BIN)/python" -m ruff check --fix .
	"$(BIN)/python" -m ruff format .

types: $(STAMP)
	"$(BIN)/python" -m pyrefly check

wheel: $(STAMP)
	rm -f dist/dstill_jax-*.whl
	"$(BIN)/python" -m build --wheel --no-isolation --outdir dist .

# Leaves what you trained (runs/, .demo/) alone. Removes $(VENV) only if it is a virtual environment.
clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find dstill_jax pallas_kernels tests configs experiments -name __pycache__ -type d -prune -exec rm -rf {} +
	if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
