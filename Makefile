# make run    set up .venv and decode real text twice, routing off and on
# make test   set up .venv and run the tests
# TORCH says which torch is installed first: `make TORCH="torch==2.13.0 --index-url URL" run` picks a build.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOKENS ?= 150
GPU_WORKERS ?= 6
# One torch thread a worker: two processes with default threads are slower than one.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: run test test-slow test-gpu check fix docs-figures wheel clean

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed. Got " + sys.version.split()[0]) if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev,serve,plot]'
	touch $(STAMP)

run: $(STAMP)
	$(BIN)/python examples/first_run.py --tokens $(TOKENS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" --durations 15

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "slow and not gpu" --durations 15

# On the machine with the GPU: installs nothing, takes PYTHON as found.
test-gpu:
	$(PYTHON) -m pytest -m "gpu and not alone" -n $(GPU_WORKERS) -p no:cacheprovider --durations 15
	$(PYTHON) -m pytest -m "gpu and alone" -p no:cacheprovider

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tables and pictures of docs/price.md, measured anew: about an hour on two quiet cores.
docs-figures: $(STAMP)
	$(BIN)/python docs/price_figures.py

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build *.egg-info
