#!/usr/bin/env bash
# compute-sanitizer over a few calls: memcheck (out of bounds, misaligned) and racecheck (shared memory).
#     tests/gpu/sanitize.sh [python]           every kernel of attention, and of the KV cache
#     tests/gpu/sanitize.sh [python] kv        of the KV cache alone
# PyTorch's allocator hands out parts of large blocks, in which memcheck sees no bounds: it is switched off.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTORCH_NO_CUDA_MEMORY_CACHING=1
check() {
    echo "== $*"
    compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 "$python" -m "${@:2}"
}
if [ "${2:-all}" != kv ]; then
    "$python" -m tests.gpu.sanitize --check triton hopper  # compiles, and fails early
    check memcheck tests.gpu.sanitize triton hopper
    check racecheck tests.gpu.sanitize triton
fi
"$python" -m tests.gpu.sanitize_kv --check
check memcheck tests.gpu.sanitize_kv
check racecheck tests.gpu.sanitize_kv
