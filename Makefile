# make setup    virtual environment in .venv with server and development packages; instant the second time
# make demo     one prefill engine, one decode engine, a router, eight prompts; ARGS="--json out.json" is passed on
# make test     all tests, in two processes; ARGS="tests/cluster -k config" is passed on, ARGS="-n 0 -s" shows prints
# make check    formatting, lint, types, import borders
# make format   rewrites the tree in the house format
# make proto    regenerates the gRPC stubs from twopass/proto/twopass.proto
# make docs     rewrites the tables of docs/handoff.md from the code; a test compares them
# make bench    figures of this machine in about 12 minutes: scheduler, linears and steps, transfer, router, serving,
#               interference and preemption
# make soak     ten minutes of mixed load; exits 1 when blocks or memory do not come back; ARGS="--minutes 60" is passed
#               on
#
# `make setup` compiles the installed packages to bytecode once. A deployment starts five Python processes and more, and
# some of them may run as a user who cannot write the bytecode.
#
# PyPI gives Linux the CUDA build of torch (about 3 GB). The CPU build is smaller and enough for everything here: put
# its wheel in a folder that `pip config get global.find-links` names, or set UV_FIND_LINKS to one, before `make setup`.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.twopass-setup
FIND_LINKS = $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null)
ARGS ?=

.PHONY: setup demo test check format proto docs bench soak

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --compile-bytecode \
		$(addprefix --find-links ,$(FIND_LINKS)) --editable '.[server,dev]'
	touch $@

demo: setup
	$(BIN)/twopass demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup
	$(BIN)/python -m twopass.proto.generate

docs: setup
	$(BIN)/python -m docs.handoff_tables

bench: setup
	$(BIN)/python -m bench.scheduler_time --json
	$(BIN)/python -m bench.runner
	$(BIN)/python -m bench.quantization
	$(BIN)/python -m bench.transfer --json
	$(BIN)/python -m bench.router
	$(BIN)/python -m bench.serving
	$(BIN)/python -m bench.interference
	$(BIN)/python -m bench.preemption_modes --json

soak: setup
	$(BIN)/python -m bench.soak $(ARGS)
