# The entry point of all tasks: `make help` lists the targets. CI runs the same commands.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# The tests start hundreds of servers, which import bytecode also where the environment says not to write it.
unexport PYTHONDONTWRITEBYTECODE

VENV   := .venv
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
SUITE  ?=
ARGS   ?=

RUST_SOURCES := $(shell find crates -name '*.rs' -o -name 'Cargo.toml') Cargo.toml Cargo.lock
WEBUI_SOURCES := $(shell find webui -type f -not -path '*/node_modules/*' -not -path 'webui/tests/*')

.PHONY: help setup build serve check docs test test-python test-rust test-long test-clients lint lint-rust lint-python lint-rest fmt bench bench-disk-cache bench-engine bench-load bench-lora bench-serve bench-server bench-peers bench-peers-avx2 bench-quality bench-speculation bench-speculation-curve bench-speculation-peers bench-ui screenshots attack soak soak-sim mutants fuzz faults-core wheel gpu-bundle lock clean model browser

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- setup and build: each step leaves a stamp, so that a second run does nothing ---

setup: $(STAMPS)/python ## create .venv with everything that the build and the tests need

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

$(STAMPS)/webui: $(WEBUI_SOURCES) | $(STAMPS)/tools
	@scripts/build-webui.sh && { test ! -e python/llaisys/webui/index.html || touch $@; }

build: $(STAMPS)/core $(STAMPS)/webui ## build the core, the package and the web UI, and install them in .venv

model: build ## download the default model into the cache folder
	@$(VENV)/bin/llaisys pull smollm2

# --- use ---

serve: build ## serve the default model with the OpenAI API and the web UI (ARGS="--port 8001 ...")
	@exec $(VENV)/bin/llaisys serve $(ARGS)

docs: build ## build the documentation site in site/; a broken link or a page outside the navigation fails
	$(PY) scripts/doc_tables.py --check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# --- tests and benchmarks ---

browser: $(STAMPS)/python
	@scripts/ensure-browser.sh $(PY)

lint: build ## run rustfmt, clippy, ruff, mypy, stubtest, import rules, codespell and house tests
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint-rust lint-python lint-rest

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo clippy -p llaisys-py -p llaisys-core --features faults --lib --test faults --quiet -- -D warnings

lint-python:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m mypy.stubtest llaisys._core --ignore-missing-stub

lint-rest:
	$(VENV)/bin/lint-imports --no-cache
	git ls-files -z '*.md' '*.py' '*.rs' '*.ts' '*.svelte' '*.yaml' | xargs -0 $(VENV)/bin/codespell
	npm --prefix webui run --silent check
	$(VENV)/bin/pytest -q tests/house

check: lint ## run lint and the fast tests (under 3 minutes)
	cargo test -p llaisys-core --quiet --lib --test kv --test load --test forward
	npm --prefix webui test --silent
	$(VENV)/bin/pytest -q tests/unit -n 2 --dist loadfile --no-loadscope-reorder

$(STAMPS)/node-clients: tests/clients/node/package.json tests/clients/node/package-lock.json | $(STAMPS)/tools
	@npm --prefix tests/clients/node ci --silent --no-audit --no-fund
	@mkdir -p $(STAMPS) && touch $@

ifeq ($(SUITE),)
test: lint model browser faults-core $(STAMPS)/node-clients ## run every test except the long ones (SUITE=stage0|stage1|stage2: only those acceptance tests)
	cargo test -p llaisys-core --quiet --no-run
	cargo test -p llaisys-core --quiet --features faults --test faults --no-run
	@$(MAKE) -j2 test-python test-rust
	$(VENV)/bin/pytest -q -m "not long and two_cpus" $$(grep -rl two_cpus tests --include='test_*.py')

test-python:
	npm --prefix webui test --silent
	$(VENV)/bin/pytest -q tests --ignore=tests/house -m "not long and not two_cpus" -n 2 --dist loadfile --no-loadscope-reorder

# They take what the Python tests, which often wait, leave of the CPUs. What they print is shown when they end.
test-rust:
	@{ nice -n 19 cargo test -p llaisys-core --quiet && \
		nice -n 19 cargo test -p llaisys-core --quiet --features faults --test faults; \
	} >target/test-rust.log 2>&1 || { cat target/test-rust.log; exit 1; }
	@grep '^test result' target/test-rust.log
else
test: model browser
	$(VENV)/bin/pytest -q tests/acceptance -m "$(SUITE)"
endif

test-long: model browser faults-core ## run storms, parity with the real model, the builds of the wheel and of the Dockerfile, and the GPU bundle's dry run
	SIM_SEEDS=20 SIM_REQUESTS=200000 $(VENV)/bin/pytest -q tests/sim/test_simulation.py tests/sim/test_memory.py
	KILLS=24 SCHEMATHESIS_EXAMPLES=40 $(VENV)/bin/pytest -q tests/lifecycle/test_process.py tests/e2e/test_openapi.py -k "random_moments or schemathesis"
	FAULT_PASSES=24 $(VENV)/bin/pytest -q tests/faults/test_every_point.py
	$(VENV)/bin/pytest -q tests -m long

.venv-clients/stamp: tests/clients/requirements.txt
	python3 -m venv .venv-clients
	.venv-clients/bin/pip install --quiet -r tests/clients/requirements.txt
	@touch $@

# Without a lock file: a registry may lack an agent's packages of other systems, which `npm ci` refuses.
$(STAMPS)/agents: tests/clients/agents/package.json | $(STAMPS)/tools
	@npm --prefix tests/clients/agents install --silent --no-audit --no-fund --no-package-lock
	@mkdir -p $(STAMPS) && touch $@

test-clients: model .venv-clients/stamp $(STAMPS)/agents ## run LangChain, LiteLLM, llm, Codex, Claude Code and opencode against a server (1.5 GB of packages); results in benches/results
	$(PY) tests/clients/run.py --python .venv-clients/bin/python | tee benches/results/clients.txt

bench: build ## benchmark kernels and the decode step (criterion), and compare each product with its roofline
	cargo bench -p llaisys-core --bench kernels --bench attention --bench decode --bench sampling -- \
		--warm-up-time 0.3 --measurement-time 1
	@rustc -C opt-level=3 -C target-cpu=native -o target/machine_speed benches/machine_speed.rs
	$(PY) benches/roofline.py

bench-engine: model ## benchmark the engine: simulator rate, Python cost of a step, second turn, reclaim time
	$(PY) benches/simulate.py | tee benches/results/engine.jsonl
	$(PY) benches/engine.py | tee -a benches/results/engine.jsonl
	$(PY) benches/turns.py | tee -a benches/results/engine.jsonl

bench-speculation: model ## measure speculative decoding against none, in pairs; results in benches/results/speculation.jsonl
	$(PY) benches/speculation.py $(ARGS)

bench-speculation-curve: build ## measure speculation of the 0.5B shape with scripted drafts, 0 to 100 % of them right (about an hour)
	$(PY) benches/speculation_curve.py $(ARGS)

bench-speculation-peers: model ## compare speculation with llama.cpp's n-gram and draft modes: speed, equal texts (builds llama-server)
	@scripts/build-peers.sh --only-server
	$(PY) benches/speculation_peers.py $(ARGS)

bench-disk-cache: model ## measure the prefix cache's disk tier: first token after a restart, cost of writing, in pairs
	$(PY) benches/disk_cache.py $(ARGS)

bench-lora: model ## measure LoRA adapters: 16 streams with four of rank 16 compared with none, in pairs
	$(PY) benches/lora.py $(ARGS)

fuzz: ## fuzz each parser for MINUTES of CPU time (default 10) with AFL++; results in benches/results/fuzz.txt
	@scripts/fuzz.sh $(or $(MINUTES),10)

bench-load: model ## measure time and memory of loading a model; results in benches/results/load.jsonl
	$(PY) benches/load.py $(ARGS)

bench-serve: model ## benchmark a running server: first token, per token, throughput
	$(PY) benches/server.py load $(ARGS)

bench-server: model ## benchmark overload, /health under large bodies, grammar masks and what HTTP adds to a step (8 minutes)
	$(PY) benches/server.py overload health mask streams lag $(ARGS)

attack: model ## run every case of tests/attack on one server: /livez, another key's stream, memory (ARGS="--only WORD")
	$(PY) benches/attack.py $(ARGS)

soak: model ## run mixed traffic and faults over HTTP for MINUTES (default 30); memory, files and threads must stay flat
	$(PY) benches/soak.py --minutes $(or $(MINUTES),30) $(ARGS)

soak-sim: build ## simulate a million requests over 400 seeds; memory must stay flat and every invariant hold
	SIM_REQUESTS=1000000 $(VENV)/bin/pytest -q -s --timeout 7200 tests/sim/test_memory.py
	SIM_SEEDS=400 $(VENV)/bin/pytest -q --timeout 7200 tests/sim/test_simulation.py -k random_requests

mutants: build ## mutation tests of scheduler, prefix cache, cells and ids (long); survivors in benches/results
	$(VENV)/bin/pip install --quiet 'mutmut>=3.3,<4'
	$(PY) scripts/mutants.py $(ARGS)
	$(PY) benches/mutants_core.py --out benches/results/mutants-rust.txt

.venv-peers/stamp: scripts/build-peers.sh benches/peers_models.py benches/machine_speed.rs
	@scripts/build-peers.sh
	@touch $@

bench-peers: model .venv-peers/stamp ## compare with llama.cpp, ik_llama.cpp and OpenVINO (ARGS="--only targets"); continues an earlier run
	$(PY) benches/peers.py $(ARGS)

bench-peers-avx2: model .venv-peers/stamp ## the same comparison as on a CPU without AVX-512, on one that has it
	@scripts/build-peers.sh --only-avx2
	LLAISYS_ISA=avx2 $(PY) benches/peers.py $(ARGS)

bench-quality: model .venv-peers/stamp ## measure quantization loss, ours and llama.cpp's: mean KL divergence from float32 over 5,120 tokens
	$(PY) benches/quality.py $(ARGS)

bench-ui: build browser ## benchmark the web UI on a stream of 200 tokens per second: first paint, a long chat, long tasks
	$(PY) benches/ui.py $(ARGS)

screenshots: model browser ## take the screenshots in docs/screenshots for the README; review them
	$(PY) scripts/screenshots.py

# --- release and maintenance ---

faults-core: $(STAMPS)/faults-core ## build the core with fault points, for tests/faults (a separate, unoptimized build)

$(STAMPS)/faults-core: $(RUST_SOURCES) $(STAMPS)/python
	@PYO3_PYTHON=$(CURDIR)/$(PY) cargo build -p llaisys-py --features faults,extension-module --quiet
	@mkdir -p $(VENV)/faults && cp $${CARGO_TARGET_DIR:-target}/debug/lib_core.so $(VENV)/faults/_core.abi3.so
	@touch $@

wheel: $(STAMPS)/python $(STAMPS)/webui ## build one abi3 manylinux_2_28 wheel in dist/, with the web UI
	@scripts/wheel.sh $(VENV)/bin

gpu-bundle: wheel model ## build wheel, parity tests and inputs for a bare machine with a GPU, in dist/gpu (docs/deployment/gpu.md)
	$(PY) benches/gpu/bundle.py $(ARGS)

fmt: $(STAMPS)/python ## format all code in place: rustfmt, ruff and the web UI formatter
	cargo fmt --all
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format --quiet .
	npm --prefix webui run --silent fmt

lock: ## write requirements.lock from the versions in .venv
	@scripts/lock-python.sh $(PY) > requirements.lock.new && mv requirements.lock.new requirements.lock

clean: ## remove everything that a build created, except the model cache
	rm -rf $(VENV) .venv-peers .venv-clients target dist site webui/node_modules tests/clients/node/node_modules tests/clients/agents/node_modules python/llaisys/webui
	find python tests benches -name __pycache__ -type d -prune -exec rm -rf {} +
	find python -name '_core*.so' -delete
