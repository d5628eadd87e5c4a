#!/bin/bash
# The real SGLang beside ours on a machine with GPUs where nothing can be downloaded: tests/sglang/run_gpu.sh one|two [FOLDER]
#
#   one   the tests of one GPU, and those of SGLang's names and signatures
#   two   the tests that need two GPUs
#   cpu   the tests that need no GPU
#
# `make test-sglang` runs them all where packages can be had. The log goes to FOLDER (bench-results); the exit status
# tells. From the environment, with what stands here if not given:
#   PYTHON=python3     an interpreter with torch, triton, cuda-bindings, cuda-core, transformers, pytest, pytest-timeout
#   WHEELS=            a folder of wheels of all else, made with `python -m tests.sglang.gather_wheels FOLDER`
#   TEST_LIMIT=240     seconds
set -u
kind=${1:?one, two or cpu}
out=${2:-bench-results}
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.." || exit 2
mkdir -p "$out"
export PYTHONUNBUFFERED=1

case $kind in
one) tests=(tests/sglang/test_gpu.py tests/sglang/test_contract.py -k "not two-gpus") ;;
two) tests=(tests/sglang/test_gpu.py -k two-gpus) ;;
cpu) tests=(tests/sglang/test_layer.py tests/sglang/test_contract.py) ;;
*)
    echo "one, two or cpu, not $kind" >&2
    exit 2
    ;;
esac

if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        "$WHEELS"/*.whl || exit 2
    # All engines at once would each compile SGLang's two thousand files.
    "$python" -m compileall -q -j 0 "$site" >/dev/null 2>&1
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
# SGLang finds the plugin through the entry point of a distribution; the folder that egg_info makes is one.
"$python" setup.py -q egg_info build_ext --inplace >"$out/build.log" 2>&1 || echo "no C helper: see $out/build.log"

timeout --kill-after=10 "${TEST_LIMIT:-240}" "$python" -m pytest -q -p no:cacheprovider --durations=8 "${tests[@]}" 2>&1 |
    tee "$out/sglang_$kind.log"
exit "${PIPESTATUS[0]}"
