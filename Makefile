# Two commands are all the set-up: `make demo` and `make test`. Both create .venv on first use.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test check benchmark clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing fedortho and its pinned dependencies into $(VENV) (once, about two minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; say which with: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## train an orthogonal network on embedded images, make it forget a class (about a minute)
	@echo "1. Training vgg-mini with orthogonal kernels on fashion-mini (6,000 images, embedded)"
	@rm -rf runs/demo runs/demo-forgot
	$(BIN)/fedortho train --data fashion-mini --model vgg-mini --epochs 4 --out runs/demo
	@echo "2. Forgetting the class Dress: observe, rank, prune, repair; no retraining"
	$(BIN)/fedortho forget runs/demo class:Dress --out runs/demo-forgot
	@echo "3. What is left, class by class"
	$(BIN)/fedortho evaluate runs/demo-forgot

test: $(STAMP)  ## format, lint, types, tests and doctests: all that CI runs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest

benchmark: $(STAMP)  ## overhead of the penalties, in one run (about half an hour on two cores)
	$(BIN)/python benchmarks/overhead.py

clean:  ## remove the virtual environment and build files; runs stay
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
