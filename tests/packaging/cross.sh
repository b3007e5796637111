#!/usr/bin/env bash
# Wheels for AArch64, cross-compiled from the source archive in dist/ against torch's wheels for it:
# cross.sh MINOR... They are put into dist/, and not used here. The tools are those of wheels.sh. Rust's
# library for AArch64 comes from rustup (`rustup target add aarch64-unknown-linux-gnu`), the compiler
# from Debian (g++-aarch64-linux-gnu).
set -euo pipefail
cd "$(dirname "$0")/../.."
gnu=aarch64-linux-gnu
export CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu _PYTHON_HOST_PLATFORM=linux-aarch64 STRIP=$gnu-strip \
  CC_aarch64_unknown_linux_gnu=$gnu-gcc CXX_aarch64_unknown_linux_gnu=$gnu-g++ \
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$gnu-g++ CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
if ! [ -d "$(rustc --print target-libdir --target $CARGO_BUILD_TARGET)" ]; then
  echo "skipped: Rust has no standard library for $CARGO_BUILD_TARGET here"
  exit 0
fi
if ! command -v $gnu-g++ >/dev/null; then
  echo "skipped: there is no $gnu-g++ here"
  exit 0
fi
python=$PWD/.make/wheel-tools/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for minor in "$@"; do
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_aarch64 --dest "$work/$minor" "torch==$minor.*"
  "$python" -m zipfile -e "$work/$minor"/torch-*.whl "$work/$minor"
  TENSORIZER_TORCH=$work/$minor/torch TENSORIZER_WHEEL_FOR=$minor \
    "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/built" dist/*.tar.gz
  rm -f dist/*+torch"$minor"-*aarch64.whl
  PATH="${python%/*}:$PATH" auditwheel repair --wheel-dir dist \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' "$work/built"/*+torch"$minor"-*.whl
  "$python" tests/packaging/contents.py dist/*+torch"$minor"-*aarch64.whl dist/*.tar.gz
  rm -rf "${work:?}/$minor"
done
"$python" tests/packaging/index.py dist
ls dist/*aarch64*
