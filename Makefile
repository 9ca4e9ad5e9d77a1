# SPDX-License-Identifier: Apache-2.0
# `make help` lists the verbs. Everything is installed into $(VENV) at the versions of constraints.txt, and the tests import
# the wheel installed there, never the tree.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PEERS ?= ../shared/peers
EXAMPLE_DATA ?= ../shared/data
BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
# Two more than there are cores: tests of brokers and of killed processes wait for a third of their time.
WORKERS ?= $(shell expr $(JOBS) + 2)
# Warnings of our own compiler are errors in CI; a stranger's newer compiler must not stop a build.
WERROR ?= $(if $(CI),ON,OFF)
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE THIRD_PARTY_NOTICES \
  $(shell find src csrc/core csrc/bind -name '*.py' -o -name '*.pyi' -o -name 'py.typed' -o -name '*.cpp' -o -name '*.h' -o -name '*.html' \
  -o -name '*.proto' -o -name '*.binpb')
# A worker that crashes ends the run: with another in its place, pytest-xdist waits for ever for the tests that it left.
XDIST = --dist loadfile --max-worker-restart 0
# Files in the order of tests/schedule.py: the longest first.
SUITE = HOTBED_TEST_WHEEL=1 $(BIN)/pytest -m "not soak" -n $(WORKERS) $(XDIST) --no-loadscope-reorder
BASE ?= $(shell git rev-parse --quiet --verify --abbrev-ref origin/main || echo main)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
unexport PYTHONPATH
# Each worker compiles all files of tests: half of its start, unless the run before left them compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo examples test quick durations soak bench docs lint format wheel wheels sanitize native matrix protos upgrade clean
.DEFAULT_GOAL := help

help:                ## list the verbs
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /\1\t/' | expand -t 12

setup: $(VENV)/.installed   ## make the environment, build the native core, install the wheel

$(VENV)/.tools: constraints.txt constraints-torchrec.txt
	@echo "installing the pinned versions of constraints.txt into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -r constraints.txt
	@rm -rf $(VENV)/torchrec
	@$(BIN)/python -m pip install -qq --no-deps --target $(VENV)/torchrec -r constraints-torchrec.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	@echo "building the wheel"
	@rm -rf build/wheel
	@$(BIN)/python -m pip wheel -qq --no-build-isolation --no-deps -C cmake.define.HOTBED_DEV=$(WERROR) -w build/wheel .
	@$(BIN)/python -m pip install -qq --no-deps --force-reinstall build/wheel/hotbed-*.whl
	@$(BIN)/python -m pip check
	@touch $@

demo: setup          ## train on the shipped MovieLens events, offline then online, and write report.html
	@$(BIN)/python examples/demo.py

examples: setup      ## the three HugeCTR pipelines on the real data in EXAMPLE_DATA, with reports in runs/hugectr
	@$(BIN)/python examples/hugectr/run.py criteo $(EXAMPLE_DATA)/criteo/kaggle_head10001.tsv
	@$(BIN)/python examples/hugectr/run.py rees46 $(EXAMPLE_DATA)/rees46/2019-Oct.head.csv
	@$(BIN)/python examples/hugectr/run.py mind $(EXAMPLE_DATA)/mind

test: setup          ## lint, and the whole suite against the installed wheel, beside each other
	@mkdir -p build
	@$(MAKE) lint >build/lint.log 2>&1 & lint=$$!; \
	  $(SUITE) $(PYTEST_FLAGS); suite=$$?; \
	  wait $$lint; lint=$$?; cat build/lint.log; exit $$((suite ? suite : lint))

quick: setup         ## the tests that reach what changed since main (or BASE=...), for about a minute
	$(SUITE) --quick $(BASE) $(PYTEST_FLAGS)

durations: WORKERS = $(JOBS)
durations: setup     ## run the suite on an idle machine and record what each file costs, for the order of `make test`
	$(SUITE) --record-durations

soak: setup          ## the tests that take minutes
	HOTBED_TEST_WHEEL=1 $(BIN)/pytest -m soak --timeout 3600 -n $(JOBS) $(XDIST) $(PYTEST_FLAGS)
	$(SUITE) tests/property --hypothesis-profile soak
	@scripts/native_tests.sh $(BIN) soak

bench: setup         ## ours and the peers in turn; prints the table of the README
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/bench -G Ninja -DHOTBED_PYTHON=OFF -DHOTBED_BENCH=ON >/dev/null
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/bench >/dev/null
	$(BIN)/python benchmarks/run.py --peers $(PEERS) $(BENCH_FLAGS)

docs: setup          ## the documentation site, in build/site; a link that leads nowhere is an error
	@$(BIN)/sphinx-build -q -W --keep-going -E -b html docs build/site
	@echo "build/site/index.html"

lint: setup          ## ruff, mypy strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n $(JOBS)
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

format: $(VENV)/.tools   ## rewrite the files as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

wheel: setup         ## the wheel of this Python, in dist/
	@mkdir -p dist && cp build/wheel/hotbed-*.whl dist/ && ls dist

wheels: $(VENV)/.tools   ## wheels to publish, in dist/: for each Python here, with the manylinux tag that its symbols allow
	@scripts/wheels.sh $(BIN)

native: $(VENV)/.tools   ## the doctest suite of the native core, plain
	@scripts/native_tests.sh $(BIN) plain

sanitize: $(VENV)/.tools   ## the same under the address, thread and undefined-behaviour sanitizers
	@scripts/native_tests.sh $(BIN) address undefined thread

matrix: setup        ## the suite's core on other Pythons and on torch 2.6, connections on the newest uvicorn; arm64 and clang compile
	@scripts/matrix.sh $(BIN)

protos: $(VENV)/.tools   ## compile the .proto files of the gRPC services after a change
	@for file in $$(find src -name '*.proto'); do \
	  $(BIN)/python -m grpc_tools.protoc -I src --descriptor_set_out=$${file%.proto}.binpb $$file || exit 1; done

upgrade:             ## newest versions of everything, into constraints.txt
	@scripts/upgrade.sh $(PYTHON)

clean:               ## forget what was built; keep the environment
	rm -rf build dist $(VENV)/.installed
