#!/bin/sh
# The doorbell's kernels on a GPU under compute-sanitizer, a few steps each. BIN: a Python environment (.venv/bin by
# default). Needs no network; compute-sanitizer is of the CUDA toolkit, or of the package nvidia-cuda-sanitizer-api.
#   memcheck   kernels stay within their tensors, for each way to ring; without torch's cache every tensor has its bounds
#   initcheck  no read of memory that was not written  racecheck, synccheck  shared memory and barriers of push and pull
# Times of answers are not checked: kernels are many times slower under a sanitizer.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
FILE=tests/hybrid/test_gpu_transport.py
STEPS="replays or eager"

fail() {
    printf '\nproa: %s\n' "$1" >&2
    exit 1
}

find_sanitizer() {
    for place in "$(command -v compute-sanitizer || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" \
        "$BIN"/../lib/python3.*/site-packages/nvidia/*/bin/compute-sanitizer; do
        if [ -x "$place" ]; then
            printf '%s' "$place"
            return
        fi
    done
    fail "there is no compute-sanitizer here: not in PATH, nor in ${CUDA_HOME:-/usr/local/cuda}/bin (CUDA_HOME), nor in \
$BIN's packages. Nothing was checked."
}

# check TOOL TESTS OPTION...
check() {
    tool=$1 tests=$2
    shift 2
    printf 'proa: %s: %s\n' "$tool" "$tests"
    DOORBELL_REPLAYS=4 "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all "$@" \
        "$BIN/python" -m pytest -q -m gpu -o timeout=0 "$FILE" -k "$tests" || fail "$tool found something, or the tests failed: see above."
}

sanitizer=$(find_sanitizer)
"$BIN/python" tools/need_gpu.py
"$sanitizer" --version | head -3
ours="--kernel-name kernel_substring=_pu" # _push and _pull, not those of torch: but who writes must be seen by initcheck
check memcheck "($STEPS) and number"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 check memcheck "eager and number" # a graph would need the cache
check memcheck "($STEPS) and (flags or calls)"
check initcheck "($STEPS) and number"
for each in racecheck synccheck; do
    # shellcheck disable=SC2086 # two words
    check "$each" "($STEPS) and number" $ours
done
echo "proa: compute-sanitizer found nothing"
