# The commands of this project; `make` lists them. `setup` is called by those that need it, and costs nothing
# the second time: it runs again only when pyproject.toml or constraints.txt changed, or the folder was moved.
# Variables: PYTHON=python3.12 (any Python >= 3.11), JOBS=2 (processes that share the tests).

PYTHON ?= python3
JOBS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
PINNED = $(shell sed -n 's/^$(1)==/&/p' constraints.txt)

# the commands inside a virtual environment hold its path: a moved or copied folder is set up anew
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

.PHONY: help setup demo test test-matrix test-faults test-paths lint accuracy tiny-seeds bench speed-page

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: $(STAMP) ## make .venv with the `quaver` command and everything that tests need
	@:

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "setup: there is no '$(PYTHON)'; install Python 3.11 or later, or name one: make setup PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: $$($(PYTHON) --version) is too old, Quaver needs 3.11 or later; name one: make setup PYTHON=..." >&2; exit 1; }
	@if [ -e $(STAMP) ] && [ "$$(cat $(STAMP))" != "$(CURDIR)" ]; then rm -rf $(VENV); fi
	@if [ ! -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "setup: making $(VENV) with $$($(PYTHON) --version)"; \
	  rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "setup: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	@echo "setup: installing $(call PINNED,torch)"
	@$(PIP) $(call PINNED,torch)
	@echo "setup: installing Quaver and what it and its tests need"
	@$(PIP) --no-deps $(call PINNED,torchao)
	@$(PIP) -c constraints.txt -e '.[dev]'
	@echo $(CURDIR) > $(STAMP)
	@echo "setup: done; $(BIN)/quaver is ready"

demo: setup ## train a small mixture of experts in MXFP8 on real text, a few minutes on two cores
	@$(BIN)/quaver train configs/demo.yaml
	@$(BIN)/quaver report "$$(ls -dt runs/demo* | head -n 1)" >/dev/null

test: setup ## run the tests
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS)

test-matrix: setup ## every combination of the tests on several ranks: formats, sharding, resume, launcher
	@QUAVER_MATRIX=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/ranks

test-faults: setup ## kill a run at 30 random moments and go on each time, under 25 minutes on two cores
	@QUAVER_FAULTS=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -s tests/faults

PATHS := tests/formats tests/backends tests/low_precision tests/distributed tests/models tests/training tests/ranks/test_two_ranks.py

test-paths: setup ## the equalities once more without the C++ kernels, and with AVX512 masked off
	@echo "test-paths: pure torch (QUAVER_KERNELS=off)"
	@QUAVER_KERNELS=off OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n $(JOBS) $(PATHS)
	@echo "test-paths: kernels, torch and oneDNN held to AVX2"
	@QUAVER_KERNEL_MARCH=x86-64-v3 $(BIN)/python -c "import sys; from quaver.backends import native; \
	  s = native.status(); sys.exit(None if s.path == 'native' else 'test-paths: no kernels for AVX2: ' + s.reason)"
	@QUAVER_KERNEL_MARCH=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 \
	  OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n $(JOBS) $(PATHS)

lint: setup ## style, types and the import contract
	@echo "lint: ruff"
	@$(BIN)/ruff check .
	@echo "lint: mypy"
	@$(BIN)/mypy
	@echo "lint: import contract"
	@$(BIN)/lint-imports

accuracy: setup ## continue one BF16 run in each format and compare the losses, about 20 minutes on two cores
	@$(BIN)/python benchmarks/accuracy.py

tiny-seeds: setup ## train configs/tiny from scratch over three seeds, about 40 minutes on two cores
	@$(BIN)/python benchmarks/tiny_seeds.py

bench: setup ## measure the speed table, about ten minutes; leave the machine alone meanwhile
	@$(BIN)/quaver bench

speed-page: setup ## measure the speed table for one thread and for two, and write docs/speed.md from it
	@mkdir -p build
	@for threads in 1 2; do \
	  $(BIN)/quaver bench --json --threads $$threads > build/speed-$$threads.json; \
	  $(BIN)/python benchmarks/speed_page.py build/speed-$$threads.json; \
	done
