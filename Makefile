# Two commands are all the set-up: `make demo` and `make test`. Both create .venv on first use.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FEDERATION := --data fashion-mini --clients 10 --split dirichlet:0.3 --fraction 1 --rounds 5 --batch-size 32 --threads 1 --workers 2
SAMPLED := --data fashion-mini --clients 20 --split dirichlet:0.3 --fraction 0.1 --rounds 10 --threads 1 --workers 2

.PHONY: help demo test types pytest test-slow docs benchmark fuzz chaos lock sbom clean

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

demo: $(STAMP)  ## forget a class and prove it, then a class and a client in a federation (three to six minutes)
	@rm -rf runs/demo runs/demo-* runs/references/demo-*
	@echo "1. One network: train it with orthogonal kernels on 6,000 embedded images"
	$(BIN)/fedortho train --data fashion-mini --model vgg-mini --epochs 2 --out runs/demo
	@echo "2. Forget the class Coat: hide it at once, erase it, and audit that against two networks that never saw one"
	$(BIN)/fedortho forget runs/demo class:Coat --retrain --reference-models 2 --out runs/demo-forgot
	$(BIN)/fedortho report runs/demo-forgot
	@echo "3. A federation: ten clients with different mixtures of classes train together"
	$(BIN)/fedortho federate $(FEDERATION) --out runs/demo-federation
	@echo "4. Forget the class Coat in it: sums travel, images and models do not"
	$(BIN)/fedortho forget runs/demo-federation class:Coat --level hide --max-retain-drop 0.03 --audit none --out runs/demo-federation-forgot
	@echo "5. Compare with a federation that never saw a Coat"
	$(BIN)/fedortho federate $(FEDERATION) --without class:Coat --out runs/demo-federation-retrained
	$(BIN)/fedortho judge runs/demo-federation-forgot --reference runs/demo-federation-retrained --audit none
	@echo "6. A client leaves exactly: a federation that kept its rounds goes back to before it met the client"
	$(BIN)/fedortho federate $(SAMPLED) --keep-rounds all --out runs/demo-rounds
	$(BIN)/fedortho forget runs/demo-rounds client:11 --level exact --out runs/demo-rounds-left
	@echo "7. Compare with a federation that never had the client: every byte of the model and of the log of rounds"
	$(BIN)/fedortho federate $(SAMPLED) --without client:11 --out runs/demo-rounds-never
	cmp runs/demo-rounds-left/model.safetensors runs/demo-rounds-never/model.safetensors
	cmp runs/demo-rounds-left/rounds.json runs/demo-rounds-never/rounds.json
	@echo "All requests are in the journal: fedortho journal show runs. The report: runs/demo-forgot/report.html"

test: $(STAMP)  ## format, lint, types, tests and doctests: all that CI runs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	@$(MAKE) --no-print-directory --jobs 2 types pytest

types: $(STAMP)
	$(BIN)/mypy

pytest: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder

test-slow: $(STAMP)  ## Ray, a loopback SuperLink with TLS and keys, and longer cases (an hour or more)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[dev,simulation]'
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -m slow tests

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[dev,docs]'
	@touch $@

docs: $(VENV)/.docs  ## the documentation as a site, site/index.html; a broken link or a missing docstring fails
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

benchmark: $(STAMP)  ## overhead of the penalties, in one run (about half an hour on two cores)
	$(BIN)/python benchmarks/overhead.py

fuzz: $(STAMP)  ## 24,000 hostile inputs over every door (some minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py

chaos: $(STAMP)  ## a kill at every file operation of every command (an hour or more)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos.py

lock: $(STAMP)  ## requirements.lock: the hashes of all pinned packages, from the package index
	$(BIN)/python scripts/lock.py hashes

sbom: $(STAMP)  ## dist/sbom.cdx.json: all pinned packages with versions, hashes and licences (CycloneDX)
	$(BIN)/python scripts/lock.py sbom

clean:  ## remove the virtual environment and build files; runs stay
	rm -rf $(VENV) build site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
