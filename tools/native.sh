#!/bin/sh
# Works on csrc with the cmake and ninja of a Python environment (BIN, .venv/bin by default):
#   tools/native.sh build      the library, put beside the Python package: from the cache if it was built there before
#   tools/native.sh compile    the same without reading the cache: build/native then has all objects and tests
#   tools/native.sh sanitize   the native tests under ASan + UBSan, then under TSan
#   tools/native.sh qemu       the native tests on this CPU, then on emulated ones without AVX and without AVX-512
# Libraries are kept in $PROA_CACHE/native ($XDG_CACHE_HOME/proa, ~/.cache/proa) by a hash of all that the build reads.
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

# tools_sum: a hash of what is not in csrc: compiler, linker, system headers, static libraries, flags, CMake.
tools_sum() {
    compiler=
    for name in ${CXX:-c++ g++ clang++}; do
        command -v "$name" >/dev/null 2>&1 && compiler=${CXX:-$name} && break
    done
    [ -n "$compiler" ] || fail "there is no C++ compiler (looked for ${CXX:-c++, g++, clang++}). Install one (Debian, Ubuntu: apt install g++), or name one: CXX=/path/to/g++"
    {
        cat tools/native.sh
        printf '%s\n' "$(uname -m)" "$compiler" "${CXXFLAGS:-}" "${LDFLAGS:-}" "${CPATH:-}" "${CPLUS_INCLUDE_PATH:-}" \
            "${LIBRARY_PATH:-}" "${COMPILER_PATH:-}" "${CMAKE_TOOLCHAIN_FILE:-}"
        $compiler -v 2>&1
        "$cmake" --version
        { ld --version || true; } 2>&1
        # Those that another processor lacks (immintrin.h) are reported by the compiler, with the rest.
        grep -rhoE '^ *# *include <[^>]+>' csrc | LC_ALL=C sort -u | $compiler -std=c++20 -E -P -x c++ - 2>&1 || true
        for library in libstdc++.a libgcc.a libgcc_eh.a libstdc++.so libc.so.6; do
            file=$($compiler -print-file-name="$library")
            [ ! -f "$file" ] || sha256sum "$file"
        done
    } | sha256sum | cut -c 1-64
}

# sources: a line with hash and name for each file of csrc.
sources() {
    find csrc -type f | LC_ALL=C sort | while read -r file; do sha256sum "$file"; done
}

key() {
    { tools_sum && sources; } | sha256sum | cut -c 1-64
}

# put LIBRARY: beside the Python package, unless it is there. By rename, so that a program that has the former one open
# keeps it whole.
put() {
    cmp -s "$1" "$beside" || { cp "$1" "$beside.new" && mv "$beside.new" "$beside"; }
}

# compile: in build/native. What changed is found by content, not by time: a file that was restored with its old time is
# touched, and other tools or flags begin with an empty folder.
compile() {
    of_tools=$(tools_sum)
    [ "$(cat build/native/.tools 2>/dev/null)" = "$of_tools" ] || rm -rf build/native
    mkdir -p build/native
    sources >build/native/.sources.new
    if [ -f build/native/.sources ]; then
        grep -vxFf build/native/.sources build/native/.sources.new | cut -c 67- | while read -r file; do touch "$file"; done
    fi
    mv build/native/.sources.new build/native/.sources # also if this build fails: what it left undone is still older
    printf '%s' "$of_tools" >build/native/.tools
    build build/native "$1" -DPROA_INTO_SOURCE=ON -DPROA_SANITIZE= -DCMAKE_BUILD_TYPE=Release \
        "-DCMAKE_CXX_FLAGS=${CXXFLAGS:-}" "-DCMAKE_SHARED_LINKER_FLAGS=${LDFLAGS:-}"
}

# keep KEY: stores the library that was just compiled, unless its sources changed meanwhile. A cache that cannot be
# written is no error: the library is then compiled in each checkout.
keep() {
    [ "$(key)" = "$1" ] || return 0
    mkdir -p "$cache/$1" 2>/dev/null || return 0
    cp build/native/libproa_native.so "$cache/$1/library.$$" 2>/dev/null || { rm -f "$cache/$1/library.$$"; return 0; }
    (cd "$cache/$1" && mv "library.$$" libproa_native.so && sha256sum libproa_native.so >"sum.$$" && mv "sum.$$" sum)
    ls -t "$cache" | tail -n +$((most_kept + 1)) | while read -r old; do rm -rf "${cache:?}/$old"; done
}

cmake=$(tool cmake)
ninja=$(tool ninja)
ctest=$(tool ctest)
cache=${PROA_CACHE:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/proa}/native
most_kept=8 # libraries of some 8 MB
beside=src/proa/native/libproa_native.so
mkdir -p build
if command -v flock >/dev/null 2>&1; then # two builds in one folder would disturb each other
    exec 9>build/.lock
    flock 9
fi

case ${1:-} in
build)
    key=$(key)
    if (cd "$cache/$key" 2>/dev/null && sha256sum --status -c sum 2>/dev/null); then
        touch "$cache/$key" # the least recently used ones are deleted
        put "$cache/$key/libproa_native.so"
    else
        compile all
        put build/native/libproa_native.so
        keep "$key"
    fi
    ;;
compile)
    key=$(key)
    compile all
    put build/native/libproa_native.so
    keep "$key"
    ;;
sanitize)
    build build/sanitize-address native_tests -DPROA_SANITIZE=address,undefined
    run build/sanitize-address native
    build build/sanitize-thread native_tests -DPROA_SANITIZE=thread
    run build/sanitize-thread native
    ;;
qemu)
    compile native_tests
    run build/native native # AMX too, where this CPU has it: no sanitizer watches that
    if [ "$(uname -m)" != x86_64 ] || ! command -v qemu-x86_64 >/dev/null 2>&1; then
        echo "proa: SKIPPED: there is no qemu-x86_64 here, so older CPUs were not tried (Debian, Ubuntu: apt install qemu-user)" >&2
        exit 0
    fi
    run build/native qemu
    ;;
*)
    fail "usage: tools/native.sh build | compile | sanitize | qemu"
    ;;
esac
