#!/bin/sh
# Makes .venv with Proa and its test tools, or says what is missing. Does nothing when it is up to date.
# csrc is not built here but by tools/native.sh, which keeps what it built and rebuilds what changed.
set -eu
cd "$(dirname "$0")/.."

fail() {
    printf '\nproa: %s\n' "$1" >&2
    exit 1
}

PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null 2>&1 ||
    fail "there is no '$PYTHON' on the PATH. Install Python 3.11 or newer (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" --version) is too old; Proa needs Python 3.11 or newer. Name one: make PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make virtual environments. Install the package for it (Debian, Ubuntu: apt install python3-venv) and try again."
compiler=
for name in ${CXX:-c++ g++ clang++}; do
    command -v "$name" >/dev/null 2>&1 && compiler=$name && break
done
[ -n "$compiler" ] ||
    fail "there is no C++ compiler for Proa's native library (looked for ${CXX:-c++, g++, clang++}). Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++ libstdc++-static; Arch: pacman -S gcc), or name one: make CXX=/path/to/g++"

stamp=.venv/.proa-installed
want=$(cat pyproject.toml constraints.txt tools/venv.sh | cksum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

echo "proa: making .venv (the first time this takes a minute or two)" >&2
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
# Of 16,000 Python files some hundred are ever imported: those are compiled then.
SKBUILD_WHEEL_CMAKE=false .venv/bin/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]' ||
    fail "installing the dependencies failed; the reason stands above. Without a network connection, point pip at a local mirror (PIP_INDEX_URL or PIP_FIND_LINKS) and try again."
printf '%s' "$want" >"$stamp"
