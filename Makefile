# Everything runs in .venv, which `make setup` makes and keeps up to date.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.set-up

.PHONY: setup test test-slow simulate train lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,lora,data,math,puzzles,dev]'
	touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 -m 'not slow'

test-slow: setup
	$(BIN)/pytest -m slow

simulate: setup
	$(BIN)/sortedrl simulate

train: setup
	$(BIN)/sortedrl train

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
