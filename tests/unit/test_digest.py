"""The digest kernel: the same source compiled for the CPU, against the xxhash package; and for GPUs by NVRTC."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engram_server.device_digest import KERNEL, SOURCE

SUPPORT = Path(__file__).parents[1] / "support"
COMPILER = shutil.which("g++") or shutil.which("c++")
REGISTERS = 128
"""An H200's share of the tables is 12 warps a multiprocessor: they fit with room for others."""
BLOCK_ROWS_OF_VALUES = 4  # rows whose values are 1,024 bytes


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("kernel") / "digest.so"
    options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    source = [f'-DKERNEL="{SOURCE}"', str(SUPPORT / "warp_digest.cpp")]
    done = subprocess.run([COMPILER, *options, *source, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library)).digest_on_cpu


def digests(kernel: Any, pieces: list[tuple[np.ndarray, np.ndarray]]) -> list[bytes]:
    given = b"".join(struct.pack("<QQQ", v.ctypes.data, s.ctypes.data, len(v) // 256) for v, s in pieces)
    out = ctypes.create_string_buffer(16 * len(pieces))
    kernel(given, out, len(pieces))
    return [out.raw[16 * k : 16 * k + 16][::-1] for k in range(len(pieces))]


def piece(rows: int, seed: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random rows, the values at a multiple of 16 bytes, the scales `shift` words from one."""
    raw = np.random.default_rng(seed).integers(0, 256, rows * 264 + 64, np.uint8)
    values = raw[-raw.ctypes.data % 16 :][: rows * 256]
    spare = np.zeros(rows * 8 + 64, np.uint8)
    scales = spare[-spare.ctypes.data % 16 + 8 * shift :][: rows * 8]
    scales[:] = raw[rows * 256 :][: rows * 8]
    return values, scales


def expected(values: np.ndarray, scales: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(values.tobytes() + scales.tobytes())


@given(rows=st.integers(1, 3000), seed=st.integers(0, 99), shift=st.integers(0, 1))
def test_a_piece_of_any_size_has_the_digest_that_xxhash_gives_it(on_cpu: Any, rows: int, seed: int, shift: int) -> None:
    one = piece(rows, seed, shift)
    assert digests(on_cpu, [one]) == [expected(*one)]


def test_every_end_of_the_last_block_and_every_border_of_values_and_scales_is_right(on_cpu: Any) -> None:
    """The last block has 1 to 16 stripes, and the values end anywhere in a block."""
    pieces = [piece(rows, rows, rows % 2) for rows in range(1, 33 * BLOCK_ROWS_OF_VALUES + 5)]
    assert digests(on_cpu, pieces) == [expected(*one) for one in pieces]


def test_pieces_of_one_launch_do_not_touch_each_other(on_cpu: Any) -> None:
    pieces = [piece(rows, 5) for rows in (7, 900, 1, 64)]
    assert digests(on_cpu, pieces) == [expected(*one) for one in pieces]


def test_bytes_that_are_all_zero_or_all_ones_are_digested_too(on_cpu: Any) -> None:
    for byte in (0, 255):
        values, scales = piece(500, 1)
        values[:], scales[:] = byte, byte
        assert digests(on_cpu, [(values, scales)]) == [expected(values, scales)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles_for_gpus_and_keeps_everything_in_registers(arch: str) -> None:
    pytest.importorskip("cuda.core")
    from engram_client.lookup import nvrtc

    code, log = nvrtc.compile_source(SOURCE.read_text(), arch)
    assert code[:4] == b"\x7fELF"
    assert f"entry function '{KERNEL}'" in log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    used = re.search(r"Used (\d+) registers", log)
    assert used
    assert int(used[1]) <= REGISTERS


def test_the_source_travels_with_the_package() -> None:
    import tomllib

    settings = tomllib.loads((SUPPORT.parents[1] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["engram_server"]
    assert any(SOURCE.match(pattern) for pattern in patterns)
