#!/bin/sh
# Prints what a build lacks on this machine, and what brings it; nothing if all is there.
# Usage: needs.sh PYTHON, in the folder of the sources.
python=$1
rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
rustup="curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"

# older FOUND WANTED: true if a version is older than another.
older() {
  [ "$1" != "$2" ] && [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]
}

if ! command -v "$python" >/dev/null; then
  echo "Python is missing ($python): apt install python3 python3-venv, or make PYTHON=/path/to/python3"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "$python is older than 3.10: make PYTHON=/path/to/another"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  echo "Python's venv is missing: apt install python3-venv"
elif ! command -v cargo >/dev/null; then
  echo "cargo is missing: install Rust by $rustup, and open a new shell (Debian's is too old)"
elif older "$(cargo --version | cut -d ' ' -f 2)" "$rust"; then
  echo "$(cargo --version) is older than $rust: rustup update, or $rustup"
elif ! command -v c++ >/dev/null; then
  echo "a C++ compiler is missing: apt install g++"
elif ! echo 'int main() {}' | c++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
  echo "$(c++ --version | head -n 1) does not know C++20: g++ 10 or newer is needed"
elif [ "$(df -Pm . | awk 'NR == 2 { print $4 }')" -lt 7000 ]; then
  echo "less than 7 GB are free here: torch takes 4.7 GB, and what is compiled 1.1 GB"
fi
