#!/bin/sh
# Runs a program on the emulated CUDA: run.sh PROGRAM [arguments]
here=$(cd "$(dirname "$0")" && pwd)
lib=${FAKE_CUDA_LIB:-$here/../../../.make/fake-cuda}
if ! [ -f "$lib/libcufile.so.0" ]; then
  echo "build first: sh $here/build.sh PYTHON" >&2
  exit 2
fi
lib=$(cd "$lib" && pwd)
preload="$lib/libcuda.so.1 $lib/libcufile.so.0${LD_PRELOAD:+ $LD_PRELOAD}"
exec env LD_PRELOAD="$preload" "$@"
