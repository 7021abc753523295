#!/bin/sh
# Kernels of the doorbell, of promotions and of moving experts on a GPU under compute-sanitizer, a few steps each. BIN: a
# Python environment (.venv/bin by default). Needs no network; compute-sanitizer is of the CUDA toolkit, or of the
# package nvidia-cuda-sanitizer-api.
#   memcheck   kernels stay within their tensors, for each way to ring, in passes that promote experts, and while experts
#              move and tables change; without torch's cache every tensor has its bounds
#   initcheck  no read of memory that was not written  racecheck, synccheck  shared memory and barriers: push and pull
#              of the doorbell, all kernels of a pass that promotes
# Times of answers are not checked: kernels are many times slower under a sanitizer.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
BELL=tests/hybrid/test_gpu_transport.py
STEPS="replays or eager"
PROMOTIONS="hot_take_slots and auto-192-False-qwen3-moe-cuda" MOVES="qwen3-moe-2-True-cuda or qwen3-moe-2-False-cuda"

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

# check TOOL FILE TESTS OPTION...
check() {
    tool=$1 file=$2 tests=$3
    shift 3
    printf 'proa: %s: %s\n' "$tool" "$tests"
    DOORBELL_REPLAYS=4 "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all "$@" \
        "$BIN/python" -m pytest -q -m gpu -o timeout=0 "$file" -k "$tests" || fail "$tool found something, or the tests failed: see above."
}

sanitizer=$(find_sanitizer)
"$BIN/python" tools/need_gpu.py
"$sanitizer" --version | head -3
ours="--kernel-name kernel_substring=_pu" # _push and _pull, not those of torch: but who writes must be seen by initcheck
check memcheck "$BELL" "($STEPS) and number"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 check memcheck "$BELL" "eager and number" # a graph would need the cache
check memcheck "$BELL" "($STEPS) and (flags or calls)"
check initcheck "$BELL" "($STEPS) and number"
for each in racecheck synccheck; do
    # shellcheck disable=SC2086 # two words
    check "$each" "$BELL" "($STEPS) and number" $ours
    check "$each" tests/hybrid/test_routed.py "$PROMOTIONS"
done
check memcheck tests/hybrid/test_routed.py "$PROMOTIONS"
check memcheck tests/hybrid/test_moves.py "$MOVES"
echo "proa: compute-sanitizer found nothing"
