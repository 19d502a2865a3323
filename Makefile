# make demo: a fresh machine to a finished report.  make test: a fresh machine to a green test run.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check results base clean
.DELETE_ON_ERROR:

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m pipeline

test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: $(VENV)/installed
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

# Copies what is published of the tables under runs/reports into results/.
results: $(VENV)/installed
	$(BIN)/python scripts/publish_results.py

# Makes the small world's base again and compares it with the shipped one.
base: $(VENV)/installed
	scripts/make_sandbox_base.sh

clean:
	rm -rf $(VENV)
