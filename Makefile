# `make demo` and `make test` set up .venv themselves, and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# TESTS='not sweep' runs both tiers in one session: what the tests of a file share is paid for once
TESTS ?= not integration and not sweep
# more workers than cores: some tests wait for time limits. The tests of a file share what they set up; tests/conftest.py
# puts the longest files first, where xdist itself would put those of most tests
PYTEST := pytest -n 3 --dist loadfile --no-loadscope-reorder
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo guard test test-integration sweep-parity sweep-families sweep-faults sweep-gpu sweep-compress sweep-cluster sweep-islands sweep-buckets sweep-mutations sweep-scale sweep-image sweep-tests gpu-check wheelhouse check clean help

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

test: check  ## style, types and the tests that need no heavy service; what this machine cannot run is skipped, and says why
	$(PYTEST) -m '$(TESTS)'

guard: $(READY)  ## four minutes: losses of a run that is killed and resumed, a run of an earlier commit, rows of the journal
	python -m tests.guard
	python -m tests.house

test-integration: $(READY)  ## the long tests: Slurm, Ray, Spark, S3, GCS, launchers, pairs of layout options, faults
	$(PYTEST) -m 'integration and not sweep'

sweep-parity: $(READY)  ## every legal layout against the reference: thousands of runs, hours; resumable (docs/sweeps/)
	python -m tests.sweeps parity

sweep-families: $(READY)  ## every causal language model of transformers, trained, exported, loaded again, and in every layout: an hour; resumable
	python -m tests.sweeps families

sweep-tests: $(READY)  ## the tests of further layouts that neither tier has time for
	$(PYTEST) -m 'sweep and not slurm'

sweep-faults: $(READY)  ## kills, stops, full disks and damaged checkpoints at random moments: hours; resumable
	python -m tests.sweeps faults

sweep-cluster: $(READY)  ## nodes of a virtual Slurm cluster die at a site's own time limits: an hour; resumable; needs root and Slurm
	pytest -m 'sweep and slurm' tests
	python -m tests.sweeps cluster

sweep-islands: $(READY)  ## islands are killed at random moments, and come late: half an hour; resumable
	python -m tests.sweeps islands

sweep-buckets: $(READY)  ## runs in an object store are killed at random moments, and the store has faults: half an hour; resumable
	python -m tests.sweeps buckets

sweep-mutations: $(READY)  ## 200 small faults in the code, drawn by a seed, each of which a test has to find: hours; resumable
	python -m tests.sweeps mutations

sweep-scale: $(READY)  ## what grows with the size of a run, at the size of a thousand nodes: half an hour; resumable
	python -m tests.sweeps scale

sweep-gpu: $(READY)  ## a training step of every shipped config on a GPU that is not there: an hour; resumable
	python -m tests.sweeps gpu

sweep-compress: $(READY)  ## architecture x scheme x tokenizer, scored by vLLM, llama.cpp and transformers: an hour; resumable
	python -m tests.sweeps compress

sweep-image: $(READY)  ## every line of the CPU image in a bare Debian, then data prep and training in it: minutes; needs root and debootstrap
	pytest -m sweep tests/k8s/test_image.py

# needs no .venv, no network, and of packages only torch: what others are missing for is listed
# the environment's Python where there is one, unless PYTHON is given
gpu-check: GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
gpu-check:  ## on a machine with a GPU, ten minutes: GPU tests and speed, into docs/performance.md (PYTHON=, WHEELS=, ARGS=)
	$(GPU_PYTHON) -m benchmarks.gpu --page docs/performance.md $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

WHEELHOUSE ?= out/wheelhouse
wheelhouse:  ## headrace and all it needs as wheels, for machines without a network (docs/how-to/install.md); EXTRAS=[clean,ray]
	$(PYTHON) -m pip wheel --constraint constraints.txt --wheel-dir $(WHEELHOUSE) $(WHEEL_OPTIONS) '.$(EXTRAS)'

clean:  ## remove what the demo and the tests made; the environment stays
	rm -rf out/demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
