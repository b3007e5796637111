#!/usr/bin/env bash
# Tests that take too long for every change. Writes the record tests/long.txt, and fails if any did.
# Torch minors other than the one developed on: LONG_TORCHES="2.10 2.12".
set -uo pipefail
cd "$(dirname "$0")/.."
# What is missing is a failure.
export CI=true
torches=${LONG_TORCHES-2.10 2.12 2.13 2.14 2.15}
record=tests/long.txt
failed=0
{
  echo "commit $(git rev-parse --short HEAD)$(git diff --quiet HEAD -- . ":!$record" || echo ' with changes')"
  echo "date $(date -u +%F)"
  echo "machine $(nproc) cores, $(uname -m), $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)"
  echo
} >"$record"

# try NAME COMMAND...: runs it, and notes its time and its last line.
try() {
  local name=$1 log begun=$SECONDS verdict=passed
  shift
  log=$(mktemp)
  echo "=== $name"
  "$@" 2>&1 | tee "$log"
  if [ "${PIPESTATUS[0]}" != 0 ]; then verdict=FAILED failed=1; fi
  printf '%-50s %s in %d s: %s\n' "$name" "$verdict" $((SECONDS - begun)) \
    "$(grep -v '^$\|DeprecationWarning' "$log" | tail -n 1)" >>"$record"
  rm -f "$log"
}

try "tests of Python that are marked long" make --no-print-directory test-python WHICH="-m long"
try "tests of the emulated CUDA that are marked long" make --no-print-directory test-cuda WHICH="-m long"
try "models, memcheck and tch of Rust" make --no-print-directory test-rust-long
for feature in cuda http redis s3; do
  try "the core with $feature alone" cargo check --release --package tensorizer --no-default-features --features $feature
done
try "the benchmarks at toy size, with the peers" make --no-print-directory bench-quick
try "mutations of the calls to CUDA" "$PYTHON" tests/cuda/mutations.py
try "200,000 tensors by every call" env TENSORS_OF_TESTS=200000 "$PYTHON" -m pytest tests/python/test_large_headers.py
try "old releases, on files with metadata" "$PYTHON" tests/old_releases.py
libraries=$(grep -E '^(transformers|diffusers|peft|safetensors|lightning|sglang)==' tests/packaging/frameworks.txt | tr '=' ' ' | tr -s ' \n' ' ')
try "frameworks: ${libraries% }" make --no-print-directory test-frameworks
try "vLLM $(sed -n 's/^VLLM ?= //p' Makefile), its loaders" make --no-print-directory test-vllm
for torch in $torches; do
  try "torch $torch" make --no-print-directory test-other-torch OTHER="$torch"
  rm -rf ".venv-$torch" ".make/torch-$torch"
done
try "wheels for torch $torches 2.11, each used" make --no-print-directory wheels TORCHES="$torches 2.11"
cat "$record"
exit $failed
