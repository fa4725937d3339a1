# Commands of the project; each does its own set-up. `make` lists them.
#
# Variables: PRESET=release (build; or library, asan, tsan, fuzz), SECONDS_EACH=60 (check),
# FUZZ_SECONDS=300 (fuzz), SLACK=1 (test; 3 on a slower machine: multiplies the seconds that a stage
# may take), SHARE=1 (test-all; 3: one of three exhaustive Python tests, by the commit), POOLS=6
# (test-gpus: groups of processes side by side).

SHELL := /bin/bash
PYTHON := build/venv/bin/python
PYTHON_GPU ?= python3
PRESET ?= release
POOLS ?= 6
SECONDS_EACH ?= 60
FUZZ_SECONDS ?= 300
SLACK ?= 1
SHARE ?= 1
# Compiled on first import, which is quicker than compiling all that pip installs.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-gpus build check bench-cpu bench-gpu sanitize fuzz format docs clean setup-build setup-test setup-test-all setup-bench setup-docs packages-test packages-test-all

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: setup-build ## A trained model on regard.attention: sentences, errors, speed, a picture
	@tools/build.sh python
	@$(PYTHON) examples/demo.py

test: packages-test ## All features and pairs of them; the last line says how many passed
	@python3 tools/test.py --slack $(SLACK)

test-all: packages-test-all ## The same, then exhaustive tests, a chip of each kind, sanitizers, fuzzing
	@python3 tools/test.py --tier all --slack $(SLACK) --share $(SHARE)

test-gpu: ## The GPU's tests, with this machine's python3 (NumPy, pytest, PyTorch)
	@$(PYTHON_GPU) tools/test_gpu.py

test-gpus: ## Those of several processes on GPUs (NCCL from two on), by a python3 that also has regard and pytest-xdist
	@$(PYTHON_GPU) -m pytest -q -rs -n $(POOLS) -p no:cacheprovider \
	  tests/package/test_torch_distributed_cuda.py

build: setup-build ## Build library, tool, examples and tests (PRESET=release)
	@tools/build.sh $(PRESET)

check: build ## Random problems against float64, a minute on each instruction set
	@$(PYTHON) tools/check_backends.py --seconds $(SECONDS_EACH)

bench-cpu: setup-bench ## Time PyTorch, JAX, NumPy and ours on the CPU; writes bench/results
	@tools/build.sh python
	@$(PYTHON) -m regard.bench --device cpu --preset full --out bench/results \
	  --plot bench/images/cpu.svg

bench-gpu: ## The same on a GPU, by this machine's python3, which has PyTorch and regard
	@$(PYTHON_GPU) -m regard.bench --device cuda:0 --preset full --out bench/results \
	  --plot bench/images/gpu.svg

sanitize: setup-test-all ## The tests under the address, undefined behaviour and thread sanitizers
	@$(PYTHON) tools/test.py --tier all --only asan,tsan --slack $(SLACK)

fuzz: setup-test-all ## Fuzz the public API (FUZZ_SECONDS=300)
	@$(PYTHON) tools/test.py --tier all --only fuzz --slack $(SLACK) --fuzz-seconds $(FUZZ_SECONDS)

format: setup-test ## clang-format over every C and C++ file
	@tools/format.sh

docs: setup-docs ## The guides and the API reference, as a site in build/docs
	@doxygen docs/reference/Doxyfile
	@$(PYTHON) -m sphinx -q -E -W --keep-going -c docs/reference -d build/doctrees docs build/docs
	@echo "docs: build/docs/index.html"

clean: ## Remove build/: binaries, virtual environment, logs
	rm -rf build

setup-build setup-test setup-test-all setup-bench setup-docs: setup-%:
	@tools/setup.sh $*

packages-test packages-test-all: packages-%:
	@tools/setup.sh $* --packages
