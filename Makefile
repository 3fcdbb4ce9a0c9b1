# Two commands from a fresh machine: `make run` and `make test`. `make` alone lists all.

PYTHON ?= python3
MODEL ?= smollm2-135m
BACKENDS ?= cpu
ROUNDS ?= 7
SECONDS ?= 600
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-$(BACKENDS)

# llama-cpp-python is built from source with these flags, unless pip finds a ready wheel where the person's settings say.
BUILD_ENV := CMAKE_ARGS="-DCMAKE_PROJECT_INCLUDE=$(CURDIR)/build/llama_cpp.cmake $(CMAKE_ARGS)" SLOTFILE_BACKENDS=$(BACKENDS) \
	CMAKE_BUILD_PARALLEL_LEVEL=$${CMAKE_BUILD_PARALLEL_LEVEL:-$$(getconf _NPROCESSORS_ONLN)}
PIP_INSTALL := $(BUILD_ENV) $(BIN)/python -m pip install --quiet --disable-pip-version-check
LLAMA_CPP := $(shell grep -o 'llama-cpp-python==[0-9.]*' pyproject.toml)
# Skips pip's cache and ready wheels, for the one library that they may hold in another form.
FROM_SOURCE := --no-cache-dir --no-binary llama-cpp-python --force-reinstall --no-deps

.DEFAULT_GOAL := help
.PHONY: help setup exe model run test soak bench lint clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(SETUP) ## make .venv with all that building and testing need

$(SETUP): pyproject.toml build/llama_cpp.cmake
	@sh build/check_tools.sh $(PYTHON) $(BACKENDS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the libraries; llama.cpp is compiled unless a ready wheel is found: 5 to 10 minutes on two cores, in silence"
	@$(PIP_INSTALL) --editable '.[dev,build]'
	@$(BIN)/python -m build.llama_libraries $(BACKENDS) || { echo "compiling $(LLAMA_CPP) from source" && \
		$(PIP_INSTALL) $(FROM_SOURCE) $(LLAMA_CPP) && $(BIN)/python -m build.llama_libraries $(BACKENDS); }
	@touch $@

exe: $(SETUP) ## build dist/MODEL, one file that runs (MODEL=smollm2-135m BACKENDS=cpu)
	$(BIN)/python -m build.executable $(MODEL) --backends $(BACKENDS)

model: $(SETUP) ## download and verify a model (MODEL=smollm2-135m)
	$(BIN)/python -m build.executable $(MODEL) --fetch-only

run: exe ## set up, build and start: the terminal chat and the endpoint
	dist/$(MODEL)

test: $(SETUP) ## run all tests, on the real models and the built executable
	$(BIN)/python -m build.executable gemma3-270m --fetch-only
	$(BIN)/python -m build.executable smollm2-135m --backends cpu
	$(BIN)/python -m pytest

soak: $(SETUP) ## ten minutes of random clients and injected failures (SECONDS=600 SEED=number EXE=dist/MODEL)
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(addprefix --seed ,$(SEED)) $(addprefix --executable ,$(EXE))

bench: ## measure beside llama-server (PEER=path/to/llama-server ROUNDS=7)
	@test -x "$(PEER)" || { echo "Error: make bench PEER=path/to/llama-server needs the server to compare with" >&2; exit 2; }
	$(MAKE) exe
	$(BIN)/python -m build.bench --peer $(PEER) --executable dist/$(MODEL) --rounds $(ROUNDS)

lint: $(SETUP) ## ruff and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

clean: ## remove what was built and downloaded
	rm -rf $(VENV) .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
