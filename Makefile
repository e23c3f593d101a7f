# `make demo` and `make test` set up .venv themselves, and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test test-matrix test-faults check clean help

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/ - /'

$(READY): pyproject.toml constraints.txt data_prep/sources/_jsonl.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): some minutes the first time, most of it torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## the whole way, from raw text to a small quantized model
	@demo/run.sh

check: $(READY)  ## style, types, import contracts
	ruff check .
	ruff format --check .
	mypy
	lint-imports

# more workers than cores: some tests wait for time limits. The tests of a file share what they set up
test: check  ## everything; what this machine cannot run is skipped, and says why
	pytest -n 3 --dist loadfile

test-matrix: $(READY)  ## every legal layout against the reference: thousands of runs, hours
	pytest -m matrix

test-faults: $(READY)  ## 300 kills, stops, full disks and damaged checkpoints at random moments: over an hour on two cores
	python -m tests.faults.campaign --kills 200 --report out/faults_campaign.md
	python -m tests.data_prep.campaign --faults 105 --report out/data_prep_campaign.md

clean:  ## remove what the demo and the tests made; the environment stays
	rm -rf out/demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
