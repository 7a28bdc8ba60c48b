# Everything below runs in one environment: the package, editable, with all its extras, at the versions in
# constraints.txt. It is made once, and updated when pyproject.toml or constraints.txt changes.

PYTHON ?= $(or $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c 'import sys; print(sys.executable)' 2>/dev/null))),python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-hosts test lint types docs wheels bench recovery scaling soak chaos fuzz ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "ARGS='...' goes to the command; PYTHON=python3.13 chooses the Python of the environment."

setup: $(READY) ## only the environment (.venv)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt hatchling
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[all,dev,docs]'
	@touch $@

$(BENCH_READY): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[bench]'
	@touch $@

demo: $(READY) ## train on the digits while a loader feeds the trainer
	$(BIN)/python examples/digits/demo.py $(ARGS)

demo-hosts: $(READY) ## the same from three hosts, one of which is killed (root: each is a network namespace)
	$(BIN)/python examples/digits/demo_hosts.py $(ARGS)

# The tests often wait: five processes keep two cores busy. tests/order_of_files.py says which runs what, and in which
# order. A process that has ended is not replaced: pytest-xdist would run the test that ended it again, and then wait for
# ever.
test: $(READY) ## all tests but soak and fuzz, in five processes (ARGS='tests/coordinator/test_order.py -k name': only these)
	$(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

lint: $(READY) ## ruff: rules and format; import-linter: which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## mypy --strict
	$(BIN)/mypy $(ARGS)

docs: $(READY) ## the site, in docs/_build/html
	$(BIN)/python -m sphinx -n -W --keep-going -q docs docs/_build/html

wheels: $(READY) ## build the wheel, and install it into an empty environment
	PYTHON=$(BIN)/python .ci/wheels

# Other loaders are measured if they are installed: $(BIN)/pip install -c constraints.txt -r benchmarks/requirements.txt
bench: $(BENCH_READY) ## how fast batches become tensors, beside other loaders (ARGS='--repeats 9': everything, hours)
	$(BIN)/python benchmarks/transport.py $(or $(ARGS),--quick) --json benchmarks/results/transport-$$(date +%F).json
	$(BIN)/python benchmarks/pipelines.py $(or $(ARGS),--quick) --json benchmarks/results/pipelines-$$(date +%F).json
	$(BIN)/python benchmarks/report.py

recovery: $(READY) ## how long a stream pauses when a worker, the daemon or the link fails
	$(BIN)/python benchmarks/recovery.py $(ARGS)

scaling: $(READY) ## CPU time of the coordinator, with many lanes, workers and streams
	$(BIN)/python benchmarks/coordinator.py $(ARGS)

soak: $(READY) ## the long-running tests, in two processes
	$(BIN)/python -m pytest -m soak --timeout 0 -o faulthandler_timeout=0 -n 2 --dist load --maxschedchunk 1 $(ARGS)

# Options: --scenarios 2000 --seed 1 --jobs 2 --load 2 --reports DIR; --seed 417 --scenarios 1 replays one.
chaos: $(READY) ## random feeds, consumers and faults against a plain model (ARGS='--scenarios 2000': half an hour)
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: $(READY) ## arbitrary bytes into every decoder, and into the ports of daemons (ARGS='--fuzz-seconds 600')
	$(BIN)/python -m pytest -m fuzz --timeout 0 -o faulthandler_timeout=0 $(ARGS)

ci: ## what CI runs
	.ci/run

clean: ## remove build outputs, but not the environment (rm -rf .venv does that)
	rm -rf build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard proto server client tests examples benchmarks) -name __pycache__ -prune -exec rm -rf {} +
