# make demo, make test, make lint, make bench: each sets up all that it needs.
# Needed beforehand: Rust, a C++20 compiler, Python 3.10 or newer.

PYTHON ?= python3
TORCH ?= torch==2.11.0
VENV := $(CURDIR)/.venv
OLD := $(CURDIR)/.venv-old
BIN := $(VENV)/bin
STAMPS := .make
TOOLS := $(CURDIR)/.make/tools
export VIRTUAL_ENV := $(VENV)
export PATH := $(BIN):$(PATH)

TCH := LIBTORCH_USE_PYTORCH=1 LD_LIBRARY_PATH=$$($(BIN)/python benchmarks/torch_lib.py)

SOURCES := $(shell find src csrc -type f) Cargo.toml Cargo.lock setup.py pyproject.toml

.PHONY: demo test test-rust test-python test-staged test-other-torch lint bench bench-quick gpu build clean

demo: $(STAMPS)/built $(STAMPS)/demo $(STAMPS)/old
	$(BIN)/python benchmarks/demo.py $(DEMO)

test: test-rust test-python test-staged

# What depends on torch's insides, on another torch: make test-other-torch OTHER=2.10
OTHER ?= 2.15
OTHER_VENV := $(CURDIR)/.venv-$(OTHER)
test-other-torch: $(STAMPS)/old
	test -x $(OTHER_VENV)/bin/python || $(PYTHON) -m venv $(OTHER_VENV)
	$(OTHER_VENV)/bin/python -m pip install --quiet "torch==$(OTHER).*" numpy psutil pytest \
	  pytest-timeout safetensors "setuptools>=77,<82" "setuptools-rust>=1.12" wheel cmake "moto[server]>=5"
	VIRTUAL_ENV=$(OTHER_VENV) $(OTHER_VENV)/bin/python -m pip install --quiet --no-build-isolation --no-deps \
	  --force-reinstall .
	PATH=$(OTHER_VENV)/bin:$(PATH) VIRTUAL_ENV=$(OTHER_VENV) $(OTHER_VENV)/bin/python -m pytest \
	  $(addprefix tests/python/test_,operators.py compile.py dispatch.py cpp.py torch_compat.py pairs.py)

# The core alone, then with servers, then with torch (lint compiles each feature alone, and the
# tests in Python build the module). The core must not pull in torch, Python or a network.
test-rust: $(STAMPS)/torch
	cargo test --no-default-features
	@if cargo tree --no-default-features -e normal --prefix none \
	  | grep -E '^(cxx|pyo3|tch|torch-sys|tokio|hyper|reqwest|aws-|redis|cudarc)'; \
	  then echo "the core alone depends on the above"; exit 1; fi
	cargo test --no-default-features --features redis,s3 --lib
	LD_LIBRARY_PATH=$$($(BIN)/python benchmarks/torch_lib.py) cargo test --no-default-features --features torch --lib
	@if $(BIN)/python -c "import sys, torch; sys.exit(torch.__version__[:5] != '2.11.')"; then set -x; \
	  $(TCH) cargo test --no-default-features --features tch --test tch && \
	  $(TCH) cargo run --no-default-features --features tch --example tch; \
	else echo "the feature tch is for torch 2.11: not tested with this one"; fi

test-python: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/old
	$(BIN)/python -m pytest $(PYTEST)

# The tests of loading and saving once more, through the stand-in for a CUDA device. Those marked
# "host" are about memory that such tensors do not have.
test-staged: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/old
	TENSORIZER_FAKE_DEVICE=7 $(BIN)/python -m pytest -m "not host" --durations=5 \
	  $(addprefix tests/python/test_,reading.py mapping.py golden.py modules.py operators.py writing.py encryption.py pairs.py async.py process.py)

lint: $(STAMPS)/built $(STAMPS)/lint
	cargo fmt --check
	cargo clippy --no-default-features --all-targets -- -D warnings
	cargo clippy --no-default-features --features redis --all-targets -- -D warnings
	cargo clippy --no-default-features --features s3 --all-targets -- -D warnings
	cargo clippy --no-default-features --features python --all-targets -- -D warnings
	$(TCH) cargo clippy --no-default-features --features tch --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --no-default-features --features cuda,redis,s3,torch
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h \
	  python/tensorizer/include/*/*.h tests/cpp/*.cpp examples/*/*.cpp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --ignore-disjoint-bases tensorizer._C
	$(TOOLS)/bin/cargo-deny --all-features check bans licenses sources

bench: $(STAMPS)/built $(STAMPS)/bench $(STAMPS)/old
	$(BIN)/python benchmarks/run.py $(BENCH)

bench-quick: $(STAMPS)/built $(STAMPS)/bench $(STAMPS)/old
	$(BIN)/python benchmarks/run.py --quick
	$(BIN)/python benchmarks/gpu/run.py --dry-run

gpu: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/bench $(STAMPS)/old
	-$(BIN)/python -m pip install --quiet instanttensor
	$(BIN)/python benchmarks/gpu/run.py $(GPU)

build: $(STAMPS)/built

clean:
	rm -rf $(STAMPS) $(VENV) $(VENV)-* build target benchmarks/data python/tensorizer/_build.py
	rm -f python/tensorizer/*.so python/tensorizer/lib/*.so

$(STAMPS)/venv:
	@mkdir -p $(STAMPS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "setuptools>=77,<82" "setuptools-rust>=1.12" wheel
	touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	touch $@

$(STAMPS)/built: $(STAMPS)/torch $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(STAMPS)/test: $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet pytest pytest-timeout psutil safetensors "transformers>=5" \
	  accelerate cmake "moto[server]>=5" redis
	touch $@

$(STAMPS)/demo: $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet safetensors "transformers>=5" rich
	touch $@

$(STAMPS)/lint: $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet ruff==0.17.* mypy==2.* clang-format==23.*
	test -x $(TOOLS)/bin/cargo-deny || cargo install --quiet --locked --debug --no-default-features \
	  --root $(TOOLS) --version 0.20.2 cargo-deny
	touch $@

$(STAMPS)/bench: $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet safetensors runai-model-streamer fastsafetensors matplotlib rich redis hiredis
	touch $@

# The old package in an environment of its own, which borrows torch from the other one.
$(STAMPS)/old: $(STAMPS)/torch
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --no-deps tensorizer==2.12.1 protobuf psutil boto3 \
	  botocore redis hiredis libnacl s3transfer jmespath urllib3 python-dateutil six async-timeout
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(OLD)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_torch.pth
	touch $@
