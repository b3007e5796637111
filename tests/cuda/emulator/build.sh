#!/bin/sh
# Builds the emulated CUDA with the headers that torch brings: build.sh PYTHON
# Goes to FAKE_CUDA_LIB, or .make/fake-cuda. Ends with 77, after saying why, where this Python's
# torch cannot use it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${FAKE_CUDA_LIB:-$here/../../../.make/fake-cuda}
python=${1:-python3}

# The folder of the installed packages, and the version of CUDA; torch itself is not imported.
found=$("$python" - <<'PY'
import importlib.util
import pathlib
import runpy
import sys


def give_up(why):
    print(f"The emulated CUDA is not built, and its tests are skipped: {why}.", file=sys.stderr)
    sys.exit(77)


torch = importlib.util.find_spec("torch")
if torch is None:
    give_up(f"{sys.executable} has no torch")
package = pathlib.Path(torch.origin).parent
cuda = runpy.run_path(str(package / "version.py")).get("cuda")
if cuda is None:
    give_up("this torch is no CUDA build")
if not cuda.startswith("13."):
    give_up(f"this torch is a build for CUDA {cuda}, and the emulator is one of CUDA 13")
include = package.parent / "nvidia/cu13/include"
for header in ("cuda.h", "cuda_runtime_api.h", "cufile.h"):
    if not (include / header).exists():
        give_up(f"there is no {include / header}")
print(package.parent, cuda, sep="\n")
PY
)
site=$(echo "$found" | sed -n 1p)

compiler=${CXX:-c++}
flags="-std=c++20 -O1 -fPIC -fvisibility=hidden -Wall -Wextra"
mkdir -p "$out"
# Everything is compiled anew for other headers or flags, and for a header of our own that changed.
made_with="$compiler $flags $found"
if [ "$(cat "$out/made-with" 2>/dev/null)" != "$made_with" ] ||
  [ -n "$(find "$here/emulator.h" "$here/build.sh" -newer "$out/made-with")" ]; then
  rm -f "$out"/*.o
  echo "$made_with" >"$out/made-with"
fi
export compiler flags site out
for source in "$here"/*.cpp; do
  object="$out/$(basename "$source" .cpp).o"
  [ -n "$(find "$object" -newer "$source" 2>/dev/null)" ] || echo "$source"
done | xargs -r -P 2 -I '{}' sh -c '$compiler $flags -c "{}" \
  -isystem "$site/nvidia/cu13/include" -idirafter "$site/triton/backends/nvidia/include" \
  -o "$out/$(basename "{}" .cpp).o"'

newest=$(ls -t "$out"/*.o "$out"/*.so.* "$here/exports.map" 2>/dev/null | head -n 1)
case $newest in
  */libcufile.so.0) exit 0 ;;
esac
objects=$(cd "$out" && ls *.o | grep -vx cufile.o)
cd "$out"
$compiler -shared $objects -o libcuda.so.1 -Wl,-soname,libcuda.so.1 \
  -Wl,--version-script="$here/exports.map" -lpthread -ldl
$compiler -shared cufile.o -o libcufile.so.0 -Wl,-soname,libcufile.so.0 libcuda.so.1
echo "built in $out"
