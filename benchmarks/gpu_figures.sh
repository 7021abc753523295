#!/bin/sh
# The figures of docs/performance.md and docs/missed.md that rest on RAM's limit, and VRAM by part, on an H200 with 16 CPUs.
#
#   benchmarks/gpu_figures.sh PART [OUT]
#
# PART: memory, cpu-bf16, cpu-codes, zipf, next, gpt-oss, freetoken-bf16, freetoken-fp8, freetoken-vram. Each takes 2 to 4
# minutes, those of FreeToken 8 to 10 (WHEELS: the folder of its wheels). JSON lines go to OUT/PART.jsonl (default: .).
set -eu
part=$1 out=${2:-.}
python=${PYTHON:-python}
export PYTHONPATH="$(dirname "$0")/../src${PYTHONPATH:+:$PYTHONPATH}"
here=$(dirname "$0")

hybrid() { "$python" -m proa.cli.main bench hybrid --json --runs 5 --output-tokens 64 "$@" | tee -a "$out/$part.jsonl"; }
memory() { "$python" "$here/probes/gpu_memory.py" --json "$@" | tee -a "$out/$part.jsonl" || true; }
freetoken() {
    "$python" "$here/peers/beside_freetoken.py" --json --layers 24 --cache-share 10 --rounds 3 --minutes 9.5 \
        ${WHEELS:+--wheels "$WHEELS"} --keep "$out/freetoken" "$@" | tee -a "$out/$part.jsonl"
}

mkdir -p "$out"
case $part in
memory) # planned and taken by part: small and long contexts, few and many requests, torch's segments of either kind
    memory --shape tiny --layers 2
    memory --shape tiny --layers 2 --max-running 64
    memory --layers 8
    memory --layers 8 --max-running 64
    memory --layers 8 --format int4 --context 131072
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True memory --layers 8
    ;;
cpu-bf16) # >= 85 % of the roof
    hybrid --layers 48 --resident 0 --requests 1,4
    hybrid --layers 24 --resident 0 --requests 1,4
    ;;
cpu-codes) # >= 75 % of the roof
    for format in fp8 int4; do hybrid --layers 48 --resident 0 --requests 1,4 --format $format; done
    ;;
zipf) # within 20 % of the roof; 4 and 8 requests
    for share in 10 25 50; do
        hybrid --layers 24 --resident $share --router zipf --requests 1,4,8 --output-tokens 256
    done
    ;;
next) hybrid --shape qwen3-next-80b-a3b --resident 70 --requests 1,4 ;;
gpt-oss) hybrid --shape gpt-oss-120b --layers 18 --format mxfp4 --resident 25 --requests 1,4 ;;
freetoken-bf16) freetoken --modes hybrid ;;
freetoken-fp8) freetoken --modes hybrid --format fp8 ;;
freetoken-vram) freetoken --modes vram ;;
*)
    sed -n '2,7p' "$0" >&2
    exit 2
    ;;
esac
