# Two commands for a newcomer: `make demo` and `make test`. Each sets everything up by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint types unit clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

# Speculative against plain decoding, side by side, with the bundled models. In float32, where the
# two texts are the same to the last token on any machine; without --dtype float32 it runs in
# bfloat16, faster.
demo: setup
	$(BIN)/draftwise generate --compare --prompts examples/prompts.jsonl \
		--target zoo:target@200m --draft zoo:draft --policy fixed --num-speculative-tokens 4 \
		--max-tokens 96 --temperature 0 --batch-size 1 --dtype float32

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
