# `make demo` shows the main job; `make test` is what CI runs. Both make .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
JOBS ?= 3
PURE_TESTS := $(addprefix tests/,engine/core engine/cuda/kernels gateway/anthropic gateway/core gateway/openai gateway/vllm generator/core shared/codec shared/protocol)
PEERS ?= peers
MODEL ?= ops/demo_model

.PHONY: install lock wheel wheel-kernels sbom wheel-check image image-wheels upgrade cluster rolling kubernetes demo test tests tests-long check quiet-check quiet-coverage quiet-tests-lowest tests-lowest coverage bench bench-batch bench-gateway bench-durability bench-heldout bench-int8 bench-kinds bench-lanes bench-media bench-omni bench-payload bench-peers bench-serve bench-tenants simulate interop chaos-quick chaos-bugs chaos-batch chaos-omni chaos-scale chaos-agents chaos chaos-matrix fuzz fuzz-decoders first-hour flood gpu leaks alerts docs screenshots clean

install: .venv/installed  ## what running needs; `make test` installs the tools of development

# ops/install.py has the reasons.
.venv/installed: pyproject.toml requirements.lock
	$(PYTHON) -m ops.install
	touch $@

.venv/dev: .venv/installed
	$(BIN)/python -m ops.install --group dev
	touch $@

# torch has a version there and no hashes: its CPU and CUDA builds of one version are other files.
# The CUDA packages are those that torch's own metadata pins.
lock:  ## renew requirements.lock and requirements-lowest.txt: the newest and oldest versions that pyproject.toml allows
	$(PYTHON) -m ops.install --tools
	$(UV) pip compile pyproject.toml --group dev --universal --python-version 3.11 \
		--generate-hashes --no-annotate --no-header --quiet > requirements.new
	awk '/^[^ ]/ { keep = !/^(torch=|nvidia-[^m]|cuda-)/ } /^torch=/ { print $$1 } keep' \
		requirements.new > requirements.lock
	$(UV) pip compile pyproject.toml --group dev --all-extras --universal --python-version 3.11 \
		--resolution lowest-direct --no-annotate --no-header --quiet \
		| grep -vE '^(torch=|nvidia-[^m]|cuda-)' > requirements-lowest.txt
	rm requirements.new

wheel: .venv/installed  ## dist/pagemill-*.whl, for pipx and `uv tool install`
	$(UV) build --wheel --system-certs --build-constraints requirements.lock

# A checkout compiles for its own processor: it keeps no libraries for others.
KERNELS ?= avx512 avx512_bf16 amx
wheel-kernels: .venv/installed  ## the wheel with kernels for KERNELS, whose first start needs no compiler
	$(BIN)/python -m shared.native.targets $(KERNELS)
	$(MAKE) wheel; code=$$?; rm -r shared/native/compiled; exit $$code

# The hashes are checked when the image is built.
image-wheels: .venv/installed  ## compose/wheels: what an image with the extras EXTRA needs without an index
	sed -n 's/^\([a-z][^ ]*==[^ ]*\).*/\1/p' requirements.lock > compose/wheels/constraints.txt
	$(BIN)/pip download --quiet --dest compose/wheels --constraint compose/wheels/constraints.txt \
		'.[otel$(EXTRA:%=,%)]' hatchling uv

IMAGE ?= pagemill:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image:  ## the image IMAGE, by default pagemill with the version, by Docker
	docker build --file compose/Dockerfile --tag $(IMAGE) .

upgrade:  ## change the running compose cluster to IMAGE, one container after the other
	$(PYTHON) -m ops.cluster.upgrade $(IMAGE)

rolling: .venv/dev  ## workers of older commits with workers of this tree, in every order; 30 minutes
	$(BIN)/python -m ops.rolling

cluster: .venv/dev  ## the compose cluster on the image IMAGE: upgrade, restarts, drains, scale; 25 minutes
	$(BIN)/python -m ops.cluster --image $(IMAGE)

kubernetes: .venv/dev  ## the chart in the API server of KUBEBUILDER_ASSETS, a folder with etcd and kube-apiserver
	@test -n "$(KUBEBUILDER_ASSETS)" || echo "kubernetes: skipped: KUBEBUILDER_ASSETS names no folder"
	@test -z "$(KUBEBUILDER_ASSETS)" || $(BIN)/pytest tests/cli/chart/test_api_server.py

sbom: .venv/dev  ## dist/pagemill-*.cdx.json: what the wheel brings, with hashes and licences
	$(BIN)/python -m ops.sbom

wheel-check: .venv/installed  ## the wheel alone, in an empty environment, answers; part of CI
	$(BIN)/python -m ops.wheel_check

demo: .venv/installed  ## images, sounds and a tool, answered over NATS; a speech, a painting, and a batch
	$(BIN)/python -m ops.demo

# Style and the pure packages need no cluster: they run in the time in which other tests wait, and
# print at their end. AFTER_TESTS names targets that wait for the tests, but not for these.
test: .venv/dev  ## style, types, import contracts, tests, coverage of the pure packages
	$(MAKE) --jobs tests $(AFTER_TESTS) quiet-check quiet-coverage quiet-tests-lowest

ifdef AFTER_TESTS
$(AFTER_TESTS): tests
endif

QUIET ?= nice -n 10
quiet-check quiet-coverage quiet-tests-lowest: quiet-%: .venv/dev
	@log=$$(mktemp); $(QUIET) $(MAKE) $* > $$log 2>&1; code=$$?; cat $$log; rm $$log; exit $$code

# Three processes for two cores, because tests wait for a third of their time. A file stays
# in one process, which shares its clusters and models; tests/conftest.py puts the longest first.
# A test that fails runs once more when the machine is free of the others. Its first failure stays in
# the output. If it fails again, or if something else than a test has failed, the run has failed.
tests: .venv/dev
	$(TESTS) --cache-clear --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder \
		$(PURE_TESTS:%=--ignore=%) || $(TESTS) --last-failed --last-failed-no-failures none

TESTS = $(BIN)/pytest -m "not long" --override-ini cache_dir=.pytest_cache/tests

# The parts that call the libraries most, within a minute of processor time.
LOWEST_TESTS := $(addprefix tests/,engine/cuda/test_fused_layers.py engine/model/test_parity.py \
	gateway/routes/test_chat.py models/test_hybrids.py::test_answers_depend_on_the_states models/test_llava_next_video.py)
.venv/lowest/installed: .venv/installed requirements-lowest.txt
	$(PYTHON) -m ops.install --lowest
	touch $@

tests-lowest: .venv/lowest/installed  ## a part of the tests, with the oldest versions that pyproject.toml allows
	.venv/lowest/bin/pytest -m "not long" -p no:cacheprovider --timeout 900 $(LOWEST_TESTS)

tests-long: .venv/dev  ## cells that repeat others, and 200 examples of each property
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder \
		--hypothesis-profile long --timeout 900 -m "long or hypothesis"

coverage: .venv/dev  ## the tests of packages without I/O, and how much of these they run
	$(BIN)/python -m slipcover -m pytest -m "not long" --timeout 900 $(PURE_TESTS)

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/dev  ## our engine against transformers, alone and over the queue; 6 minutes
	test -d $(PEERS)/models/mid-qwen2vl || $(BIN)/python -m ops.bench.models mid $(PEERS)/models/mid-qwen2vl
	$(BIN)/python -m ops.bench.peers --peers $(PEERS) --models mid-qwen2vl --only pagemill pagemill-bus transformers

bench-batch: .venv/dev  ## batches: lines a second, a million lines, their cost to an engine, users next to them, also of vLLM in PEERS; 15 minutes
	$(BIN)/python -m ops.bench.batches --peers $(PEERS)

bench-gateway: .venv/dev  ## HTTP against NATS and vLLM's server, where PEERS has it; 12 minutes
	$(BIN)/python -m ops.bench.gateway --peers $(PEERS)

bench-heldout: .venv/dev  ## arrivals, sampled requests, long prompts, images over HTTP, against transformers or vLLM in PEERS; 20 minutes
	$(BIN)/python -m ops.bench.heldout --peers $(PEERS)
	$(BIN)/python -m ops.bench.heldout --peers $(PEERS) --model mid-qwen2vl

bench-payload: .venv/dev  ## a tensor by every transport, on one host and between two
	$(BIN)/python -m ops.bench.payload
	$(BIN)/python -m ops.bench.payload --namespaces

bench-durability: .venv/dev  ## what the token log costs, jobs a second; 15 minutes
	$(BIN)/python -m ops.bench.durability
	$(BIN)/python -m ops.bench.durability --model random-135m --rounds 3
	$(BIN)/python -m ops.bench.jobs

bench-peers: .venv/dev  ## us against engines installed in PEERS, see install.sh there; 25 minutes
	$(BIN)/python -m ops.install --group bench
	$(BIN)/python -m ops.bench.peers --peers $(PEERS) --out $(PEERS)/figures.jsonl
	$(BIN)/python -m ops.bench.peers.plot $(PEERS)/figures.jsonl

bench-int8: .venv/dev  ## weights of 8 and 4 bits against full ones, MODEL a folder; 5 minutes
	$(BIN)/python -m ops.bench.int8 $(MODEL)

bench-kinds: .venv/dev  ## a model of each kind against `generate` of transformers; 5 minutes
	$(BIN)/python -m ops.bench.kinds

bench-lanes: .venv/dev  ## both lanes of an engine next to each other, by engine.interactive_slowdown; 8 minutes
	$(BIN)/python -m ops.bench.lanes --model random-135m

bench-omni: .venv/dev  ## speech and images against a plain loop and diffusers: first samples, throughput, a kill; 6 minutes
	$(BIN)/python -m ops.bench.omni

# Apart from .venv: transformers would import it, which fails with a torch for CPUs.
TORCHVISION := torchvision==0.28.0
bench-media: .venv/dev  ## clips and sounds to fields, against transformers; images during bombs; 6 minutes
	-$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/torchvision $(TORCHVISION)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m ops.bench.media

bench-serve: .venv/dev  ## vLLM's load client against the gateway, 0 errors; 3 minutes
	$(BIN)/python -m ops.interop.load --peers $(PEERS)

bench-tenants: .venv/dev  ## brokers with 1 to 500 tenants: memory, idle time, requests a second, start; 8 minutes
	$(BIN)/python -m ops.bench.tenants

simulate: .venv/dev  ## the tables of docs/contribute/scaling.md
	$(BIN)/python -m ops.simulate

interop: .venv/dev  ## with vLLM, installed in PEERS, popular clients, and MCP servers of node; 15 minutes
	$(BIN)/python -m ops.interop --peers $(PEERS)
	$(BIN)/python -m ops.interop.clients
	$(BIN)/python -m ops.interop.responses

gpu: .venv/dev  ## the CUDA path on a GPU: results, speed, errors; 7 minutes; see docs/contribute/gpu.md
	$(BIN)/python -m ops.gpu run

leaks: .venv/dev  ## 10,000 requests of all kinds, and the memory of each role after them; 5 minutes
	$(BIN)/python -m ops.leaks

flood: .venv/dev  ## a tenant's times while another one floods, over HTTP and NATS; 7 minutes
	$(BIN)/python -m ops.flood

alerts:  ## the alert rules in Prometheus, and when they fire; needs Debian's package prometheus
	promtool check rules ops/monitoring/alerts.yml
	promtool test rules ops/monitoring/alerts_test.yml

chaos-quick: .venv/dev  ## faults for three minutes, every role killed; part of CI
	$(BIN)/python -m ops.chaos quick

chaos-bugs: .venv/dev  ## every planted bug must be caught; 30 minutes
	$(BIN)/python -m ops.chaos bugs

chaos-batch: .venv/dev  ## five batches of 2,000 lines under kills of every role; 10 minutes
	$(BIN)/python -m ops.chaos run batch

chaos-scale: .venv/dev  ## 500 requests at once to engines at zero, under kills; 2 minutes
	$(BIN)/python -m ops.chaos run scale

chaos-omni: .venv/dev  ## 2,000 requests, half spoken, a tenth images, under kills of every stage; 10 minutes
	$(BIN)/python -m ops.chaos run omni

chaos-agents: .venv/dev  ## agents killed and stopped 500 times under a counting tool; an hour
	$(BIN)/python -m ops.chaos agents --restarts
	$(BIN)/python -m ops.chaos agents --kills 500

chaos: .venv/dev  ## the long runs of docs/contribute/reliability.md; an hour
	$(BIN)/python -m ops.chaos run kills
	$(BIN)/python -m ops.chaos run model
	$(BIN)/python -m ops.chaos run broker
	$(BIN)/python -m ops.chaos run omni
	$(BIN)/python -m ops.chaos run leaders
	$(BIN)/python -m ops.chaos run rolling
	$(BIN)/python -m ops.chaos run shipped

chaos-matrix: .venv/dev  ## every cell of the fault matrix, three seeds; needs root; an hour
	$(BIN)/python -m ops.chaos.matrix --seed 1 --seed 2 --seed 3

fuzz: .venv/dev  ## schemathesis over the OpenAPI document; 10 minutes
	$(BIN)/python -m ops.fuzz

fuzz-decoders: .venv/dev  ## atheris over every decoder of bytes from outside; 30 minutes
	$(BIN)/python -m ops.install --group fuzz
	nice -n 10 $(BIN)/python -m ops.fuzz_decoders

first-hour: .venv/installed  ## docs/first-hour.svg: the ten commands of the guide in a clean clone; 3 minutes
	$(BIN)/python -m ops.first_hour --svg docs/first-hour.svg

docs: .venv/dev  ## reference pages from the types, the settings and the metric catalog
	$(BIN)/python -m ops.docs

screenshots: .venv/dev  ## docs/page.png, page-phone.png, response.png and batches.png; needs Debian's chromium-driver
	$(BIN)/python -m ops.screenshot

clean:
	rm -rf .venv data .mypy_cache .ruff_cache .pytest_cache .hypothesis
