# quickstart and test need nothing but Python 3.11 or newer: they make the environment first.
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
BIN     := $(VENV)/bin
export WANDB_MODE ?= offline
export WANDB_SILENT ?= true

.PHONY: quickstart test fast lint speed clean

quickstart: $(VENV)/.run          ## the named mixers on real text, then the report: minutes on a laptop CPU
	$(BIN)/python train.py study=quickstart
	$(BIN)/python -m sweeps.report study=quickstart

test: $(VENV)/.interpreter        ## all tests, on two cores; a file's tests stay together
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

fast: $(VENV)/.dev                ## the tests that do not start whole command lines
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.dev                ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

speed: $(VENV)/.dev               ## operations, models, decoding and loop against their peers: ratios of one run
	$(BIN)/python -m evals.speed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# torch first and by its exact version: left to a range, pip may fetch a build of several GB for CUDA.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Triton beside the environment, not in it: libraries that find it on a machine without a GPU would try its kernels.
# 'make test' runs them by Triton's interpreter.
$(VENV)/.interpreter: $(VENV)/.dev
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/interpreter triton==3.9.0
	touch $@

clean:                            ## the environment, caches and full runs; results/<study>/ stays
	rm -rf $(VENV) .cache results/runs results/launches .pytest_cache .mypy_cache .ruff_cache *.egg-info
