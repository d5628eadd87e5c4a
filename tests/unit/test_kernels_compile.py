"""The lookup kernels compile on a machine without a GPU, stay within their resources, and are cached."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.core")

from engram_client.errors import KernelCompileFailed
from engram_client.layout import RowFormat
from engram_client.lookup import nvrtc
from engram_client.lookup.shapes import KERNELS, Kind, Memory, count_shape, exchange_shape, shape_for
from tests.support.cubin import resources

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
RANKS = 8
# 256 threads with 40 registers leave room for 6 blocks a multiprocessor: enough rows in flight to fill HBM.
REGISTERS = 40
RANK = """
import json, sys
from pathlib import Path
from engram_client.lookup import nvrtc
import hashlib
built = nvrtc.cubin("sm_90", folder=Path(sys.argv[1]))
print(json.dumps([hashlib.sha256(built.code).hexdigest(), built.cached]))
"""


GREEDY = """
extern "C" __global__ void frugal(float *out) { out[threadIdx.x] = 1; }
extern "C" __global__ void greedy(float *out, int at) {
    __shared__ float seen[96];
    float own[64] = {};
    for (int i = 0; i < at; ++i) own[(i * at) & 63] += out[i] * own[(i + at) & 63];
    seen[threadIdx.x % 96] = own[at & 63];
    __syncthreads();
    out[threadIdx.x] = seen[(threadIdx.x + at) % 96];
}
"""


def report(log: str) -> dict[str, tuple[int, int]]:
    """Kernel name -> registers, and bytes of stack frame: what ptxas says, where its words come through."""
    pattern = r"entry function '(\w+)'.*?(\d+) bytes stack frame[^\n]*\n[^\n]*Used (\d+) registers"
    return {name: (int(used), int(frame)) for name, frame, used in re.findall(pattern, log, re.DOTALL)}


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[bytes, str]]:
    source = nvrtc.read_source()
    return {arch: nvrtc.compile_source(source, arch) for arch in ARCHITECTURES}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_keeps_its_rows_in_registers(compiled, arch):
    code, log = compiled[arch]
    assert code[:4] == b"\x7fELF"
    kernels = resources(code)
    assert kernels
    for name, used in kernels.items():
        assert (used.frame_bytes, used.stack_bytes) == (0, 0), name
        assert 0 < used.registers <= REGISTERS, name
    said = report(log)  # empty with some versions
    assert said in ({}, {name: (used.registers, used.frame_bytes) for name, used in kernels.items()})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_that_keeps_an_array_to_itself_would_be_noticed(arch):
    code, _ = nvrtc.compile_source(GREEDY, arch)
    kernels = resources(code)
    assert kernels.keys() == {"frugal", "greedy"}
    assert (kernels["frugal"].frame_bytes, kernels["frugal"].shared_bytes) == (0, 0)
    assert kernels["greedy"].frame_bytes >= 64 * 4
    assert kernels["greedy"].stack_bytes >= 64 * 4
    assert kernels["greedy"].shared_bytes >= 96 * 4
    assert kernels["greedy"].registers > kernels["frugal"].registers


def test_every_shape_names_a_kernel_that_exists(compiled):
    kernels = set(resources(compiled["sm_90"][0]))
    named = {exchange_shape(100).kernel, count_shape(100, 132).kernel, "order_count", "order_scan", "order_place"}
    truth = (False, True)
    kinds = itertools.starmap(Kind, itertools.product(Memory, RowFormat, (1, 2), truth, truth, truth))
    for kind, tokens, id_bytes, ordered in itertools.product(kinds, (1, 400, 400_000), (4, 8), truth):
        shape = shape_for(kind, tokens, 24, 132, id_bytes=id_bytes, ordered=ordered)
        named |= {shape.kernel} | ({shape.then} if shape.then else set())
    assert named == kernels == set(KERNELS)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words():
    with pytest.raises(KernelCompileFailed) as caught:
        nvrtc.compile_source("this is not CUDA", "sm_90")
    assert caught.value.arch == "sm_90"
    assert "error" in caught.value.log


def test_the_second_start_reads_the_cache(tmp_path: Path):
    first = nvrtc.cubin("sm_90", folder=tmp_path / "new" / "folder")
    second = nvrtc.cubin("sm_90", folder=tmp_path / "new" / "folder")
    assert (first.cached, second.cached) == (False, True)
    assert first.code == second.code
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) & 0o022 == 0


def test_a_damaged_cache_file_is_compiled_again(tmp_path: Path):
    code = nvrtc.cubin("sm_90", folder=tmp_path).code
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    again = nvrtc.cubin("sm_90", folder=tmp_path)
    assert not again.cached
    assert again.code == code
    assert nvrtc.cubin("sm_90", folder=tmp_path).cached


def test_a_cache_that_cannot_be_written_does_not_stop_a_rank(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    assert nvrtc.cubin("sm_90", folder=tmp_path / "file").code[:4] == b"\x7fELF"


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert nvrtc.cache_folder() == Path("/xdg/engram-table-server")
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "/own")
    assert nvrtc.cache_folder() == Path("/own")


def test_ranks_that_start_together_all_get_the_same_kernels(tmp_path: Path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(RANKS)
    ]
    results = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    assert len({digest for digest, _ in results}) == 1
    assert nvrtc.cubin("sm_90", folder=tmp_path).cached
    assert len(list(tmp_path.iterdir())) == 1, "temporary files were left"
