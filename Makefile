# These commands need only Python >= 3.11. They make an environment of their own.
PYTHON ?= python3
VENV ?= .venv
# Pinned for development. The package itself takes a range.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# Python compiles only the modules that it imports. (0 stands for pip's `--no-compile`.)
export PIP_NO_COMPILE = 0
export PYTHONDONTWRITEBYTECODE =

.PHONY: install quickstart test test-oldest types test-engines test-clients test-wheel docs style clean

install: $(VENV)/.installed

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.tested: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[dev,quantized]"
	touch $(VENV)/.installed $@

quickstart: install
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true $(BIN)/python recipes/quickstart.py

test: $(VENV)/.tested
	$(BIN)/python -m ruff check src tests recipes experiments
	$(BIN)/python -m ruff format --check src tests recipes experiments
	$(BIN)/python -m mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# With the oldest transformers and accelerate that pyproject.toml allows. Without torchvision, tests of Gemma 4's images are skipped.
test-oldest:
	$(MAKE) install VENV=outputs/oldest
	outputs/oldest/bin/python -m pip install --quiet transformers==5.17.0 accelerate==1.12.0
	OMP_NUM_THREADS=1 outputs/oldest/bin/python -m pytest -n 2 --dist worksteal

# Types of the package. A quarter of a minute the first time, then only what changed.
types: install
	$(BIN)/python -m mypy

# One draft in vLLM, llama.cpp, OpenVINO and SGLang's models, each in its own environment. The first run takes 9 GB and half an hour or more.
test-engines: install
	HF_EAGLE3_ENGINES=outputs/engines $(BIN)/python -m pytest tests/engines -v -rs

# Programs that call `generate` with a draft: lm-evaluation-harness, LangChain, `transformers serve`.
test-clients:
	$(MAKE) install VENV=outputs/clients
	outputs/clients/bin/python -m pip install --quiet lm_eval langchain-huggingface "transformers[serving]"
	outputs/clients/bin/python -m pytest tests/clients -v -rs

# Builds the wheel, installs it in a clean environment, and runs the steps of the quickstart there.
test-wheel:
	rm -rf dist outputs/wheel
	$(PYTHON) -m venv outputs/wheel
	outputs/wheel/bin/python -m pip install --quiet build twine
	outputs/wheel/bin/python -m build
	outputs/wheel/bin/python -m twine check --strict dist/*
	outputs/wheel/bin/python -m pip install --quiet "$(TORCH)" "$$(ls dist/*.whl)[train]"
	cd outputs/wheel && PYTHONPATH= bin/python ../../tests/wheel.py

# The site with the API reference, into outputs/site. A broken link fails.
docs: $(VENV)/.documented
	$(BIN)/python -m mkdocs build --strict

$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[dev,docs]"
	touch $@

style: install
	$(BIN)/python -m ruff check --fix src tests recipes experiments
	$(BIN)/python -m ruff format src tests recipes experiments

clean:
	rm -rf $(VENV) outputs build dist .mypy_cache .pytest_cache .ruff_cache
