# Two commands; each sets up everything it needs in .venv on a machine with Python 3.11+ and make.
#   make demo   see the method at work: writes and names a picture
#   make test   lint, types and tests
.PHONY: demo test bench clean
.DEFAULT_GOAL := demo
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/ready
	$(BIN)/python examples/gaussian.py

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto

# Not needed by a newcomer: the cost tables of docs/overhead.md.
bench: .venv/ready
	$(BIN)/python benchmarks/overhead.py --page docs/overhead.md

# constraints.txt pins what was tested; an open range for torch would always draw the newest build, with CUDA.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
