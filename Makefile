# `make demo` and `make test` need Python 3.11 or newer and nothing else; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
# The engine that .venv has already, if it has one: `make test` must not put the CPU build over that for GPUs.
EXTRA ?= $(or $(patsubst $(VENV)/.ready-%,%,$(firstword $(wildcard $(VENV)/.ready-*))),cpu)
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(EXTRA)
MODEL_READY := $(VENV)/.model-ready

# Bytecode is kept, also where a shell says not to: each of the tests' hundreds of processes would compile all it imports,
# and pytest rewrite every test, which was a third of the time in which tests are collected.
unexport PYTHONDONTWRITEBYTECODE

SECONDS ?= 1800
SEED ?= 1
BASE ?= main

CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready

.PHONY: help setup lock model clients demo test test-all starts check t unit components page conformance transports hostile fuzz lint bench-decision bench-front bench-modes docs measurements long chaos differential mode-changes scale stress test-cluster hosts clients-and-links clean
help:            ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

setup: $(READY)  ## make .venv and install (EXTRA=cpu or gpu)
$(READY): pyproject.toml deploy/setup.sh $(wildcard deploy/lock-$(EXTRA).txt)
	@bash deploy/setup.sh "$(PYTHON)" "$(VENV)" "$(EXTRA)"
	@touch $@

lock:            ## write deploy/lock-cpu.txt and deploy/lock-gpu.txt anew from pyproject.toml (UPGRADE=1 for newer versions)
	@UPGRADE=$(UPGRADE) bash deploy/setup.sh "$(PYTHON)" "$(VENV)" lock

model: $(MODEL_READY)  ## prepare the default model, SmolLM2-135M, outside the repository
$(MODEL_READY): $(READY)
	@$(BIN)/ridgeline model
	@touch $@

clients: $(CLIENTS_READY) ## make .venv-clients, with other people's clients for the tests (about 300 MB of packages)
$(CLIENTS_READY): tests/clients/requirements.txt deploy/setup.sh
	@bash deploy/setup.sh "$(PYTHON)" "$(CLIENTS)" clients
	@touch $@

DEMO_S ?= 285
demo: model      ## all modes over rates that fit this machine, in about five minutes; writes runs/demo/, then demo-2 (DEMO_S=285)
	@$(BIN)/ridgeline doctor
	@$(BIN)/ridgeline compare --config deploy/local.yaml --trace demo --length-scale 0.5 --settle-s 0.3 --slo auto --budget-s $(DEMO_S) --out runs/demo

lint: setup      ## ruff (PLW1514: files have an encoding, whatever the locale), mypy strict, import rules
	@$(BIN)/ruff check . && $(BIN)/ruff check --preview --select PLW1514 --extend-exclude tests . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

check: lint      ## lint, then the unit tests of what differs from main, under a minute (BASE=origin/main)
	@tests=$$($(BIN)/python -m tools.changed_tests $(BASE)) || exit 1; [ -z "$$tests" ] || $(BIN)/pytest -q -n 2 --dist worksteal -m "not long" $$tests

t: setup         ## the tests in one file, or those of one module: make t F=router/fleet/request_route.py
	@[ -e "$(F)" ] || { echo "there is no file '$(F)': make t F=router/fleet/request_route.py"; exit 1; }
	@tests="$(F)"; case "$(F)" in tests/*) ;; *) tests=$$($(BIN)/python -m tools.changed_tests $(F)) || exit 1 ;; esac; \
	[ -n "$$tests" ] || { echo "no unit test of $(F); give a file of tests/"; exit 1; }; $(BIN)/pytest -q $$tests

unit: setup      ## tests of pure logic, under a minute
	@$(BIN)/pytest -q -n 2 --dist worksteal --durations=10 -m "not long" tests/unit

components: setup ## router, workers and commands with vLLM's code and engines without a model (about four minutes)
	@$(BIN)/pytest -q -n 2 --dist worksteal --durations=10 -m "not long" tests/components

page: setup      ## the live page in Chromium: every state, changes, keys, a stream that breaks (half a minute; skipped without a browser)
	@$(BIN)/pytest -q -n 2 --dist worksteal tests/page

conformance: setup ## every KV transport against one suite: dead peers, faults, altered frames
	@$(BIN)/pytest -q -n 2 tests/conformance

# In one run: to import vLLM takes each of its processes a quarter of a minute.
PARTS = $(BIN)/pytest -q -n 2 --dist worksteal --durations=10 tests/components tests/conformance tests/page

transports: conformance ## `make conformance`, then a network link that is shaped and cut
	@$(BIN)/pytest -q -m "not long" tests/network

fuzz: model      ## 100,000 malformed HTTP requests, gRPC messages and transfer frames (about 15 minutes); SEED=1, EXAMPLES=100000
	@$(BIN)/python -m tools.fuzz.run --seed $(or $(SEED),1) --examples $(or $(EXAMPLES),100000)

hostile: model   ## a hostile client beside a polite one, without a model, then its grammars on real engines (about three minutes; part of `make test-all`)
	@$(BIN)/pytest -q -s tests/hostile
	@$(BIN)/pytest -q -s tests/engines/test_hostile_grammars.py

test: starts model   ## the quick check that all works: lint, unit, components, conformance, real engines in all modes, a kill, a drain
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint unit
	@$(PARTS) -m "not slow and not long"
	@$(BIN)/pytest -v --durations=10 -m "core and not second_format and not long" tests/engines

test-cluster: model ## `ray up` on an emulated EC2 with hosts made of namespaces: streams, faults, scaling, `ray down` (about 7 minutes; root)
	@$(BIN)/pytest -v --durations=10 tests/hosts

starts:
	@echo "make test takes 5 to 11 minutes on two cores, make test-all 25 to 50; this machine has $$(nproc)"

# Both wait, most of the time.
hosts:
	@$(BIN)/pytest -v --durations=10 -m "not long" tests/hosts
clients-and-links:
	@$(BIN)/pytest -q -n 2 --dist loadfile --durations=10 -m "not long" tests/network tests/replay tests/fuzz

test-all: starts model ## all of `make test`, and faults, chaos, hostile clients, fuzzing, cut links, lost hosts, both number formats
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint unit
	@$(PARTS) -m "not long"
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target hosts clients-and-links
	@$(BIN)/pytest -q -s tests/hostile
	@$(BIN)/pytest -v --durations=40 -m "not long" tests/engines

long: model clients ## what asks for milliseconds of a quiet machine, and the longest cases of tests that `make test-all` has shorter ones of (about 15 minutes)
	@$(BIN)/pytest -v -m long tests/unit tests/components tests/network tests/engines tests/hosts

bench-decision: setup ## what a decision costs the router at 32 workers and 2,000 streams, without engines (10 s)
	@$(BIN)/python -m tools.bench.decision_cost $(BENCH)

docs: setup      ## the documents as a site in site/, which opens from the folder without a network; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build && echo site/index.html

measurements: setup ## write docs/measurements.md from the figures in docs/results/
	@$(BIN)/python -m tools.docs.measurements

bench-front: model  ## what a router carries, without engines: tokens/s, CPU time a token, gaps; writes runs/bench-front (about 2 minutes; BENCH="--streams 512")
	@$(BIN)/python -m tools.front.bench --model "$$($(BIN)/ridgeline model | tail -1)" $(BENCH)

bench-modes: setup  ## requests in time of a running server's modes at three rates, by the client of vllm bench serve; writes runs/bench-modes.jsonl (BENCH="--shapes 512/64 --rounds 1")
	@$(BIN)/python -m tools.bench.modes $(BENCH)

chaos: model     ## workers killed, stopped and cut off under load: nothing may be lost (SECONDS=1800 SEED=1)
	@$(BIN)/python -m tools.chaos.chaos --seconds $(SECONDS) --seed $(SEED)

differential: model  ## 500 random requests, each answered as by plain vLLM on the same cores (CASES=500 SEED=1 OPTIONS="--family gemma3 --dtype float32"; --help has all options)
	@$(BIN)/python -m tools.differential.run --seed $(SEED) --cases $(or $(CASES),500) $(OPTIONS)

mode-changes: model ## six changes of mode in three minutes under load: nothing may fail, differ or stay held (SEED=1)
	@$(BIN)/python -m tools.chaos.chaos --seconds 185 --seed $(SEED) --prefill 1 --decode 1 --faults none --kv-faults none --mode-every-s 30 --out runs/mode-changes

scale: model     ## a worker more and fewer five times, then a restart of all, under load: nothing may fail, differ or stay held (SEED=1)
	@$(BIN)/python -m tools.chaos.chaos --seconds 60 --seed $(SEED) --prefill 1 --decode 1 --faults none --kv-faults none --scale-times 5 --set ray.share_cores=true --out runs/scale

stress: model    ## 3,000 mixed requests, half of whose clients leave, at every moment: nothing may stay held (ROUNDS=1 SEED=1)
	@$(BIN)/python -m tools.chaos.stress --seed $(SEED) --rounds $(or $(ROUNDS),1) --requests $(or $(REQUESTS),3000)

clean:           ## remove the environment and the runs
	rm -rf $(VENV) $(CLIENTS) runs
