# Every target makes .venv itself, from uv.lock alone; nothing is installed again while that is unchanged.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# The first Python from 3.11 on that starts; `make PYTHON=/path/to/python` names another. Where it was built
# without optimisation, and nobody has named it, the system's is taken.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { command -v "$$python"; break; }; done)
# In quotes: the path of a checkout may have spaces.
VENV := "$(CURDIR)/.venv"
RUN := $(VENV)/bin/python
# pytest keeps what it has made of the tests' code, which takes each of its processes seven seconds.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(RUN) -m pytest
BENCHMARKS := $(filter-out report,$(basename $(notdir $(wildcard bench/[a-z]*.py))))
ARGS ?=

.PHONY: help install demo up test test-quick test-fuzz test-faults test-nfs verify format generate lock images bench cluster cluster-down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  make bench-NAME   one of: $(BENCHMARKS)"

install: ## make .venv with what uv.lock pins; the other targets do it by themselves
	@test -n "$(PYTHON)" || { echo "holdfast: no Python from 3.11 on was found; install one, or: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" scripts/install.py $(if $(filter file,$(origin PYTHON)),--optimised)

demo: install ## a preempted run ends bit-identical to an untouched one; writes build/demo.json
	@$(RUN) -m scripts.demo $(ARGS)

up: install ## start the controller on this machine, as holdfast up
	@$(VENV)/bin/holdfast up $(ARGS)

test: install ## all tests; ARGS="-k name" narrows them
	@# Tests start a thousand processes; where Python may not keep bytecode by itself, each would compile anew.
	@$(RUN) -m compileall -q bench controller scripts tests trainer
	@$(PYTEST) -n auto $(ARGS)

test-quick: install ## all tests but the slow ones and those that need a cluster
	@$(PYTEST) -n auto -m "not slow and not cluster" $(ARGS)

test-fuzz: install ## 5,000 requests made of the API's own description, against a live controller
	@FUZZ_CASES=5000 $(RUN) -m pytest tests/security/test_fuzz.py $(ARGS)

test-faults: install ## every fault of tests/cluster/faults/table.py on three nodes, or those that FAULTS names; of TrainJobs with JOBS_KIND=TrainJob
	@# A row of faults takes up to an hour: stacks are wanted just before its end (see test_faults.py).
	@FAULTS="$${FAULTS:-all}" $(RUN) -m pytest -o faulthandler_timeout=3540 tests/cluster/test_faults.py $(ARGS)

test-nfs: install ## two machines (kernels of User Mode Linux) train in a directory that they share over NFS; as root
	@NFS=1 $(RUN) -m pytest tests/nfs $(ARGS)

verify: install ## style, types, imports, lock file, generated files, Dockerfiles; shows all failures
	@$(RUN) scripts/verify.py $(ARGS)

format: install ## format the code and mend what ruff can mend
	@$(RUN) -m ruff check --fix --quiet . || true
	@$(RUN) -m ruff format --quiet .

generate: install ## write the generated files (docs, chart, dashboards) anew
	@$(RUN) scripts/generate.py

lock: install ## resolve uv.lock again, keeping pins; ARGS=--upgrade takes the newest
	@$(RUN) scripts/lock.py $(ARGS)

images: ## build the trainer's and the controller's image, by docker buildx bake; ARGS="controller --push" names targets and options
	@docker buildx version >/dev/null 2>&1 || { echo "holdfast: images are built by docker buildx, which is not here: https://docs.docker.com/build/install-buildx" >&2; exit 1; }
	@REVISION="$${REVISION-$$(git rev-parse HEAD 2>/dev/null || echo unknown)}" docker buildx bake -f docker/docker-bake.hcl $(ARGS)

bench: ## all measurements that need no GPU, one after the other, to build/bench/
	@# One that cannot be made here, as without root, keeps none of the others from it.
	@$(MAKE) --no-print-directory --keep-going $(filter-out bench-activity,$(BENCHMARKS:%=bench-%))

bench-%: install
	@test -f bench/$*.py || { echo "holdfast: no benchmark '$*'; there are: $(BENCHMARKS)" >&2; exit 1; }
	@$(RUN) -m bench.$* $(ARGS)

cluster: install ## start a Kubernetes on this machine, with the Training Operator; prints its kubeconfig; needs root; ARGS="--nodes 3" for more nodes
	@$(RUN) -m tests.cluster up $(ARGS)

cluster-down: install ## end that cluster; ARGS=--purge removes its cache of images too
	@$(RUN) -m tests.cluster down $(ARGS)

clean: ## remove .venv, build/ and every cache; runs and data elsewhere stay
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Benchmarks share the machine's cores: never two at a time, whatever -j says.
.NOTPARALLEL:
