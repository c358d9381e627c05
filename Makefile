# One door. `make help` lists the targets; CI runs the same commands as you do.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV   := .venv
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
SUITE  ?=
ARGS   ?=

RUST_SOURCES := $(shell find crates -name '*.rs' -o -name 'Cargo.toml') Cargo.toml Cargo.lock
PAGE_SOURCES := $(shell find webui -type f -not -path '*/node_modules/*' -not -path 'webui/tests/*')

.PHONY: help setup build serve check test test-long test-clients lint fmt bench bench-engine bench-load bench-serve bench-server bench-peers bench-quality bench-ui screenshots attack soak soak-sim mutants fuzz faults-core wheel gpu-bundle lock clean model browser

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up and build: each step leaves a stamp, so a second run does nothing ---

setup: $(STAMPS)/python ## virtual environment in .venv with everything a build and the tests need

$(STAMPS)/tools: scripts/check-tools.sh
	@scripts/check-tools.sh
	@test -x $(PY) || python3 -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/python: pyproject.toml requirements.lock | $(STAMPS)/tools
	@scripts/install-python.sh $(PY)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: $(RUST_SOURCES) pyproject.toml $(STAMPS)/python
	@echo "building the core (a few minutes the first time)"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(VENV)/bin/maturin develop --release >$(VENV)/build.log 2>&1 \
		|| { cat $(VENV)/build.log; exit 1; }
	@touch $@

$(STAMPS)/page: $(PAGE_SOURCES) | $(STAMPS)/tools
	@scripts/build-page.sh && { test ! -e python/llaisys/webui/index.html || touch $@; }

build: $(STAMPS)/core $(STAMPS)/page ## the core, the package and the page, installed in .venv

model: build ## the embedded default model, into the cache folder
	@$(VENV)/bin/llaisys pull smollm2

# --- use ---

serve: build ## the default model with the page and the OpenAI API (ARGS="--port 8001 ...")
	@exec $(VENV)/bin/llaisys serve $(ARGS)

# --- proof ---

browser: $(STAMPS)/python
	@scripts/ensure-browser.sh $(PY)

lint: build ## rustfmt, clippy, ruff, mypy, stubtest, import rules, house rules
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo clippy -p llaisys-py -p llaisys-core --features faults --lib --test faults --quiet -- -D warnings
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m mypy.stubtest llaisys._core --ignore-missing-stub
	$(VENV)/bin/lint-imports --no-cache
	npm --prefix webui run --silent check
	$(VENV)/bin/pytest -q tests/house

check: lint ## lint and the fast tests (under 3 minutes)
	cargo test -p llaisys-core --quiet --lib --test kv --test load --test forward
	npm --prefix webui test --silent
	$(VENV)/bin/pytest -q tests/unit -n 2 --dist loadfile

$(STAMPS)/node-clients: tests/clients/node/package.json tests/clients/node/package-lock.json | $(STAMPS)/tools
	@npm --prefix tests/clients/node ci --silent --no-audit --no-fund
	@mkdir -p $(STAMPS) && touch $@

ifeq ($(SUITE),)
test: lint model browser faults-core $(STAMPS)/node-clients ## every test except the long ones (SUITE=stage0|stage1|stage2: those acceptance tests only)
	cargo test -p llaisys-core --quiet
	npm --prefix webui test --silent
	cargo test -p llaisys-core --quiet --features faults --test faults
	$(VENV)/bin/pytest -q tests --ignore=tests/house -m "not long and not two_cpus" -n 2 --dist loadfile
	$(VENV)/bin/pytest -q tests --ignore=tests/house -m "not long and two_cpus"
else
test: model browser
	$(VENV)/bin/pytest -q tests/acceptance -m "$(SUITE)"
endif

test-long: model browser faults-core ## storms, parity on the real model, the wheel build, the GPU bundle's dry run
	SIM_SEEDS=20 SIM_REQUESTS=200000 $(VENV)/bin/pytest -q tests/sim/test_simulation.py tests/sim/test_memory.py
	$(VENV)/bin/pytest -q tests -m long

.venv-clients/stamp: tests/clients/requirements.txt
	python3 -m venv .venv-clients
	.venv-clients/bin/pip install --quiet -r tests/clients/requirements.txt
	@touch $@

test-clients: model .venv-clients/stamp ## langchain-openai, litellm and llm against a server; calls in benches/results
	$(PY) tests/clients/run.py --python .venv-clients/bin/python | tee benches/results/clients.txt

bench: build ## kernels and the decode step (criterion; in target/criterion), each product beside its roofline
	cargo bench -p llaisys-core --bench kernels --bench attention --bench decode -- \
		--warm-up-time 0.3 --measurement-time 1
	@rustc -C opt-level=3 -C target-cpu=native -o target/machine_speed benches/machine_speed.rs
	$(PY) benches/roofline.py

bench-engine: model ## the engine: simulator rate, a step's Python cost, second turn, reclaim time
	$(PY) benches/simulate.py | tee benches/results/engine.jsonl
	$(PY) benches/engine.py | tee -a benches/results/engine.jsonl
	$(PY) benches/turns.py | tee -a benches/results/engine.jsonl

fuzz: ## each parser for MINUTES of CPU time (default 10) with AFL++; results in benches/results/fuzz.txt
	@scripts/fuzz.sh $(or $(MINUTES),10)

bench-load: model ## time and memory to load a model; results in benches/results/load.jsonl
	$(PY) benches/load.py $(ARGS)

bench-serve: model ## load on a running server: first token, per token, throughput
	$(PY) benches/server.py load $(ARGS)

bench-server: model ## overload, /health under big bodies, what a mask costs (6 minutes); goals are printed
	$(PY) benches/server.py overload health mask $(ARGS)

attack: model ## every case of tests/attack on one server: /livez, another key's stream, memory (ARGS="--only WORD")
	$(PY) benches/attack.py $(ARGS)

soak: model ## mixed traffic and faults over HTTP for MINUTES (default 30): memory, files and threads stay flat
	$(PY) benches/soak.py --minutes $(or $(MINUTES),30) $(ARGS)

soak-sim: build ## a million simulated requests over 400 seeds: memory stays flat, no invariant breaks
	SIM_REQUESTS=1000000 $(VENV)/bin/pytest -q -s --timeout 7200 tests/sim/test_memory.py
	SIM_SEEDS=400 $(VENV)/bin/pytest -q --timeout 7200 tests/sim/test_simulation.py -k random_requests

mutants: build ## mutation tests of scheduler, prefix index, cells and ids (long); survivors in benches/results
	$(VENV)/bin/pip install --quiet 'mutmut>=3.3,<4'
	$(PY) scripts/mutants.py $(ARGS)
	$(PY) benches/mutants_core.py --out benches/results/mutants-rust.txt

.venv-peers/stamp: scripts/build-peers.sh benches/peers_models.py benches/machine_speed.rs
	@scripts/build-peers.sh
	@touch $@

bench-peers: model .venv-peers/stamp ## beside llama.cpp, ik_llama.cpp and OpenVINO (ARGS="--only targets"); goes on where it ended
	$(PY) benches/peers.py $(ARGS)

bench-quality: model .venv-peers/stamp ## what quantising costs, ours and llama.cpp's: mean KL to float32 over 5,120 tokens
	$(PY) benches/quality.py $(ARGS)

bench-ui: build browser ## the page on a stream of 200 tokens a second: first paint, a long chat, long tasks
	$(PY) benches/ui.py $(ARGS)

screenshots: model browser ## the main views in docs/screenshots, for the README; look at them
	$(PY) scripts/screenshots.py

# --- release and upkeep ---

faults-core: $(STAMPS)/faults-core ## the core with fault points, for tests/faults (an unoptimised build of its own)

$(STAMPS)/faults-core: $(RUST_SOURCES) $(STAMPS)/python
	@PYO3_PYTHON=$(CURDIR)/$(PY) cargo build -p llaisys-py --features faults,extension-module --quiet
	@mkdir -p $(VENV)/faults && cp $${CARGO_TARGET_DIR:-target}/debug/lib_core.so $(VENV)/faults/_core.abi3.so
	@touch $@

wheel: $(STAMPS)/python $(STAMPS)/page ## one abi3 manylinux_2_28 wheel in dist/, the page in it
	@scripts/wheel.sh $(VENV)/bin

gpu-bundle: wheel model ## wheel, parity tests and inputs for a bare machine with a GPU, in dist/gpu (docs/gpu.md)
	$(PY) benches/gpu/bundle.py $(ARGS)

fmt: $(STAMPS)/python ## rustfmt and ruff, in place
	cargo fmt --all
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format --quiet .
	npm --prefix webui run --silent fmt

lock: ## requirements.lock from the versions in .venv
	@scripts/lock-python.sh $(PY) > requirements.lock.new && mv requirements.lock.new requirements.lock

clean: ## everything that a build made; the model cache stays
	rm -rf $(VENV) .venv-peers .venv-clients target dist webui/node_modules tests/clients/node/node_modules python/llaisys/webui
	find python tests benches -name __pycache__ -type d -prune -exec rm -rf {} +
	find python -name '_core*.so' -delete
