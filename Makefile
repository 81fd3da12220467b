# `make demo` and `make test` set up what they need in .venv and do nothing twice.
PYTHON ?= python3
VIDEOS ?=
DEMO ?= demo
BIN := .venv/bin

.PHONY: demo test lint clean image bench-gpu pins

demo: .venv/installed
	$(BIN)/python benchmarks/demo.py $(DEMO) $(if $(VIDEOS),--videos "$(VIDEOS)")

test: .venv/installed-dev
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 13) else "error: Python 3.11 or 3.12 is needed, this is " + sys.version.split()[0] + "; name another with PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

pins: .venv/installed-dev  # after changing a range in pyproject.toml: install without constraints first
	(head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable) > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
