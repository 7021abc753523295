#!/bin/sh
# Works on csrc with the cmake and ninja of a Python environment (BIN, .venv/bin by default):
#   tools/native.sh build      the library, put beside the Python package; quick when nothing changed
#   tools/native.sh sanitize   the native tests under ASan + UBSan, then under TSan
#   tools/native.sh qemu       the native tests on this CPU, then on emulated ones without AVX and without AVX-512
# CMAKE_BUILD_PARALLEL_LEVEL limits how many files are compiled at once.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}

fail() {
    printf '\nproa: %s\n' "$1" >&2
    exit 1
}

# tool NAME: the environment's own, else the system's.
tool() {
    if [ -x "$BIN/$1" ]; then
        (cd "$BIN" && printf '%s/%s' "$PWD" "$1")
    else
        command -v "$1" || fail "there is no $1. Install it beside Proa: $BIN/python -m pip install $1"
    fi
}

# build FOLDER TARGET OPTION...: configures and builds, silently unless something happens or goes wrong.
build() {
    folder=$1 target=$2
    shift 2
    mkdir -p "$folder"
    "$cmake" -S csrc -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$ninja" -DPROA_DEVELOPER=ON "$@" \
        >"$folder/configure.log" 2>&1 || {
        cat "$folder/configure.log" >&2
        fail "configuring csrc failed; the reason stands above."
    }
    "$cmake" --build "$folder" --target "$target" || fail "building csrc failed; the reason stands above."
}

# run FOLDER LABEL: the tests of a build.
run() {
    "$ctest" --test-dir "$1" -L "$2" -j 2 --output-on-failure --no-tests=error
}

cmake=$(tool cmake)
ninja=$(tool ninja)
ctest=$(tool ctest)
mkdir -p build
if command -v flock >/dev/null 2>&1; then # two builds in one folder would disturb each other
    exec 9>build/.lock
    flock 9
fi

case ${1:-} in
build)
    build build/native all -DPROA_INTO_SOURCE=ON
    ;;
sanitize)
    build build/sanitize-address native_tests -DPROA_SANITIZE=address,undefined
    run build/sanitize-address native
    build build/sanitize-thread native_tests -DPROA_SANITIZE=thread
    run build/sanitize-thread native
    ;;
qemu)
    build build/native native_tests -DPROA_INTO_SOURCE=ON
    run build/native native # AMX too, where this CPU has it: no sanitizer watches that
    if [ "$(uname -m)" != x86_64 ] || ! command -v qemu-x86_64 >/dev/null 2>&1; then
        echo "proa: SKIPPED: there is no qemu-x86_64 here, so older CPUs were not tried (Debian, Ubuntu: apt install qemu-user)" >&2
        exit 0
    fi
    run build/native qemu
    ;;
*)
    fail "usage: tools/native.sh build | sanitize | qemu"
    ;;
esac
