#!/bin/bash
# Everything that needs a GPU, in one go: tests/gpu/run_all.sh one|two [FOLDER]
#
#   one   all tests of one GPU, then the benchmarks of a client beside one GPU
#   two   the tests that need two GPUs or more, then the benchmarks over groups of 2, 4 and 8, as many as there are
#
# Logs and CSV files go to FOLDER (bench-results). A step that fails or is late does not stop the next; the exit
# status tells. From the environment, with what stands here if not given:
#   PYTHON=python3            an interpreter with the packages of the extras rank, cuda, server and dev
#   TEST_LIMIT=180 BENCH_LIMIT=120     seconds; TEST_LIMIT=1800 of `two`
#   PREFETCH_GIB=8                                            size of `one`
#   FULL_GIB=94.4 WAYS=cuda_host,memfd,gpu,shards FULL_LIMIT=480     of `two`: each of two tables
#   SPLIT_GIB=16 HOST_GIB=90 TOKENS=1,16,128,1024,8192 KINDS=collective,peer_read,per_node GROUPS_LIMIT=900     of `two`
#   SGLANG=                   sglang's engram_gather.py, for comparison
#   COMMIT=                   what the CSV files say, where there is no git
#   LOAD_GIB=16 LOAD_ARGS= LOAD_LIMIT=240                     of `load`: both tables, over all GPUs
#   DEVICE_GIB=16 HOST_GIB=90 GATHER_LIMIT=400                of `gather`: one table in GPU memory, one in the host's
#   PARTS=test,bench          what of it; gather: the kernels alone; load: loads into GPU memory; full: tables of full
#                             size; sanitize: the kernels under compute-sanitizer, found by SANITIZER
set -u
kind=${1:?one or two}
out=${2:-bench-results}
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.." || exit 2
mkdir -p "$out"
export PYTHONUNBUFFERED=1 ENGRAM_TEST_GIB=${ENGRAM_TEST_GIB:-1}
status=0

step() { # name, limit, command...
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    local begin=$SECONDS
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    local code=${PIPESTATUS[0]}
    echo "== $name: exit $code after $((SECONDS - begin)) s"
    [ "$code" -eq 0 ] || status=1
}

# Without the C helpers everything works, slower.
"$python" setup.py -q build_ext --inplace >"$out/build.log" 2>&1 || echo "no C helpers: see $out/build.log"

load_gpu() { # shellcheck disable=SC2086
    [[ $parts != *load* ]] || step bench_load "${LOAD_LIMIT:-240}" "$python" -m tests.bench.load_gpu \
        --gib "${LOAD_GIB:-16}" ${LOAD_ARGS:-} --out "$out/load_gpu.csv" "${commit[@]}"
}

commit=(${COMMIT:+--commit "$COMMIT"})
parts=${PARTS:-test,bench}
tests=("$python" -m pytest -m gpu -q -p no:cacheprovider --durations=12)
case $kind in
one)
    [[ $parts != *test* ]] || step test_one "${TEST_LIMIT:-180}" "${tests[@]}" tests/gpu
    [[ $parts != *bench* ]] || step bench_one "${BENCH_LIMIT:-120}" "$python" -m tests.bench.client_gpu \
        --prefetch-gib "${PREFETCH_GIB:-8}" --out "$out/client_gpu.csv" "${commit[@]}"
    [[ $parts != *gather* ]] || step bench_gather "${GATHER_LIMIT:-400}" "$python" -m tests.bench.gather_gpu \
        --device-gib "${DEVICE_GIB:-16}" --host-gib "${HOST_GIB:-90}" ${SGLANG:+--sglang "$SGLANG"} \
        --out "$out/gather_gpu.csv" "${commit[@]}"
    if [[ $parts == *sanitize* ]]; then
        for tool in memcheck racecheck initcheck; do
            step "sanitize_$tool" "${TEST_LIMIT:-180}" "${SANITIZER:-compute-sanitizer}" --tool "$tool" \
                --report-api-errors no --error-exitcode 9 "${tests[@]}" -o timeout=900 tests/gpu/test_gather.py \
                tests/gpu/test_digest.py -k "not four_gib and not captured and not failed_driver_call"
        done
    fi
    load_gpu
    ;;
two)
    [[ $parts != *test* ]] || step test_two "${TEST_LIMIT:-1800}" "${tests[@]}" tests/gpu \
        -k "two_gpus or peer or test_groups"
    [[ $parts != *bench* ]] || step bench_two "${GROUPS_LIMIT:-900}" "$python" -m tests.bench.groups \
        --gib "${SPLIT_GIB:-16}" --host-gib "${HOST_GIB:-90}" --tokens "${TOKENS:-1,16,128,1024,8192}" \
        --kinds "${KINDS:-collective,peer_read,per_node}" ${SGLANG:+--sglang "$SGLANG"} \
        --out "$out/groups.csv" "${commit[@]}"
    [[ $parts != *bench* ]] || step predicted 60 "$python" -m tests.bench.predict "$out/groups.csv"
    load_gpu
    [[ $parts != *full* ]] || step bench_full "${FULL_LIMIT:-480}" "$python" -m tests.bench.full_size \
        --gib "${FULL_GIB:-94.4}" --ways "${WAYS:-cuda_host,memfd,gpu,shards}" --out "$out/full_size.csv" "${commit[@]}"
    ;;
*)
    echo "one or two, not $kind" >&2
    exit 2
    ;;
esac
[[ $parts == test ]] || "$python" -m tests.bench.bars "$out" | grep -v "not measured$" | tee "$out/bars.log"
exit $status
