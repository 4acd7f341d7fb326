# `make demo` shows the main job; `make test` is what CI runs. Both make .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --quiet
UV := $(BIN)/uv
TORCH := 2.13.0
JOBS ?= 3
PURE_TESTS := $(addprefix tests/,engine/core gateway/core gateway/openai gateway/vllm shared/codec shared/protocol)
PEERS ?= peers

.PHONY: lock demo test tests check quiet-check quiet-coverage coverage bench bench-gateway bench-durability bench-gpu bench-payload bench-peers bench-rendering bench-serve interop chaos-quick chaos-bugs chaos chaos-matrix fuzz docs screenshots clean

# Exact versions from requirements.lock, and this package. uv needs a tenth of pip's time, and links
# what another checkout has downloaded; where it cannot reach the index, pip may. Bytecode of what is imported comes with
# its first import; of all packages it would cost half a minute here.
.venv/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(PIP) install --no-compile --upgrade "pip>=25.1" "uv>=0.11"
	$(UV) pip install --python $(BIN)/python --system-certs --no-deps --require-hashes \
		--requirement requirements.lock || \
		$(PIP) install --no-compile --no-deps --require-hashes --requirement requirements.lock
	$(PIP) install --no-compile torch==$(TORCH)
	$(PIP) install --no-compile --no-deps --no-build-isolation --editable .
	sync  # A broker's first writes would otherwise wait for two gigabytes.
	touch $@

# torch is not in the file: an index of CPU wheels has other files of the same version than PyPI,
# whose wheels for Linux also ask for the CUDA packages.
lock:  ## renew requirements.lock: the newest versions that pyproject.toml allows
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install uv
	$(UV) pip compile pyproject.toml --group dev --universal --python-version 3.11 \
		--generate-hashes --no-annotate --no-header --quiet > requirements.new
	awk '/^[^ ]/ { keep = !/^(torch=|nvidia-|cuda-)/ } keep' requirements.new > requirements.lock
	rm requirements.new

demo: .venv/installed  ## three images and a question, answered over NATS
	$(BIN)/python -m ops.demo

# Style and the pure packages need no cluster: at a low priority they run in the time in which
# other tests wait, and print at their end.
test: .venv/installed  ## style, types, import contracts, tests, coverage of the pure packages
	$(MAKE) --jobs tests quiet-check quiet-coverage

quiet-check quiet-coverage: quiet-%: .venv/installed
	@log=$$(mktemp); nice -n 10 $(MAKE) $* > $$log 2>&1; code=$$?; cat $$log; rm $$log; exit $$code

# Three processes for two cores, because tests wait for a third of their time. A file stays
# in one process, which shares its clusters and models; tests/conftest.py puts the longest first.
tests: .venv/installed
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder \
		$(PURE_TESTS:%=--ignore=%)

coverage: .venv/installed  ## the tests of packages without I/O, and how much of these they run
	$(BIN)/pytest --timeout 900 --cov --cov-report=term:skip-covered $(PURE_TESTS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/installed  ## engine against transformers, hand-over latency, KV waste
	$(BIN)/python -m ops.bench.engine
	$(BIN)/python -m ops.bench.handover

bench-gateway: .venv/installed  ## HTTP against NATS and vLLM's server, where PEERS has it; 12 minutes
	$(BIN)/python -m ops.bench.gateway --peers $(PEERS)

bench-gpu: .venv/installed  ## kernels and models on a GPU, ten minutes; without one it says so
	$(BIN)/python -m ops.bench.gpu

bench-payload: .venv/installed  ## a tensor by every transport, on one host and between two
	$(BIN)/python -m ops.bench.payload
	$(BIN)/python -m ops.bench.payload --namespaces

bench-durability: .venv/installed  ## what the token log costs, jobs a second; 15 minutes
	$(BIN)/python -m ops.bench.durability
	$(BIN)/python -m ops.bench.durability --model random-135m --rounds 3
	$(BIN)/python -m ops.bench.jobs

bench-peers: .venv/installed  ## us against engines installed in PEERS, see install.sh there; 25 minutes
	$(BIN)/pip install --quiet --group bench
	$(BIN)/python -m ops.bench.peers --peers $(PEERS) --out $(PEERS)/figures.jsonl
	$(BIN)/python -m ops.bench.peers.plot $(PEERS)/figures.jsonl

bench-rendering: .venv/installed  ## first request after a start, requests a second; 2 minutes
	$(BIN)/python -m ops.bench.rendering

bench-serve: .venv/installed  ## vLLM's load client against our door, 0 errors; 3 minutes
	$(BIN)/python -m ops.interop.load --peers $(PEERS)

interop: .venv/installed  ## our renderer and engines with those of vLLM, installed in PEERS; 3 minutes
	$(BIN)/python -m ops.interop --peers $(PEERS)

chaos-quick: .venv/installed  ## faults for three minutes, every role killed; part of CI
	$(BIN)/python -m ops.chaos quick

chaos-bugs: .venv/installed  ## every planted bug must be caught; 20 minutes
	$(BIN)/python -m ops.chaos bugs

chaos: .venv/installed  ## the long runs of docs/contribute/reliability.md; 50 minutes
	$(BIN)/python -m ops.chaos run kills
	$(BIN)/python -m ops.chaos run model
	$(BIN)/python -m ops.chaos run leaders
	$(BIN)/python -m ops.chaos run rolling

chaos-matrix: .venv/installed  ## every cell of the fault matrix, three seeds; needs root; an hour
	$(BIN)/python -m ops.chaos.matrix --seed 1 --seed 2 --seed 3

fuzz: .venv/installed  ## schemathesis over the OpenAPI document; 10 minutes
	$(BIN)/python -m ops.fuzz

docs: .venv/installed  ## reference pages from the types, the settings and the metric catalog
	$(BIN)/python -m ops.write_messages_doc
	$(BIN)/python -m ops.write_settings_doc
	$(BIN)/python -m ops.write_metrics_doc
	$(BIN)/python -m ops.write_api_doc

screenshots: .venv/installed  ## docs/page.png and page-phone.png; needs Debian's chromium-driver
	$(BIN)/python -m ops.screenshot

clean:
	rm -rf .venv data .mypy_cache .ruff_cache .pytest_cache .hypothesis
