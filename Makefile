PYTHON ?= python3
BIN := .venv/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-part test-all lint docs bench notebooks notebooks-colab notebooks-refresh clean

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "jkv needs Python 3.11 or newer: make PYTHON=python3.12 ..." && false)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[test]'
	@touch $@

demo: .venv/installed  ## a real model generates through a compressed cache, and the receipt
	$(BIN)/python -m jkv.cli.demo

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=15

test: .venv/installed  ## short tests with a few of their cases: what is not `slow`, `hardware` or `peers`
	$(BIN)/jkv fetch smollm2-135m
	$(PYTEST) -m "not (slow or hardware or peers)"

test-part: .venv/installed  ## `make test`, and of what it leaves out a part: make test-part PART=2/5
	$(BIN)/jkv fetch smollm2-135m
	$(PYTEST) --part $(PART)

test-all: .venv/installed  ## every law of every row, and all that is slow
	$(BIN)/jkv fetch smollm2-135m
	$(PYTEST)

lint: .venv/installed  ## style, types and the arrows between packages
	$(BIN)/pip install -q -e '.[lint]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright jkv jkv/models jkv/training benchmarks examples
	$(BIN)/lint-imports --no-cache --no-logo

docs: .venv/installed  ## docs/methods.md from the catalogue; tables, and what jkv recommend ships, from results/; pictures
	$(BIN)/python docs/methods.py
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/evidence.py
	$(BIN)/python docs/pictures.py

bench: .venv/installed  ## beside transformers on the same weights
	$(BIN)/pip install -q -e '.[parity]'
	$(BIN)/python -m benchmarks.compare --json results/compare.json

notebooks: .venv/installed  ## every notebook runs, with less work in each cell
	$(BIN)/pip install -q -e '.[notebooks]'
	$(BIN)/python notebooks/run.py

notebooks-colab: .venv/installed  ## the same as Colab would: from a new wheel, in an environment without jkv
	$(BIN)/pip install -q -e '.[notebooks]'
	$(BIN)/python notebooks/run.py --colab

notebooks-refresh: .venv/installed  ## every notebook in full; what it shows is written into it
	$(BIN)/pip install -q -e '.[notebooks]'
	$(BIN)/python notebooks/run.py --refresh

clean:
	rm -rf .venv build
