"""Digests of rows in GPU memory, computed there: 94 GiB in a fraction of a second, and nothing crosses the bus.

digest.cu is the kernel, a warp a piece. Its list of pieces and its digests lie in pinned host memory, which
the GPU reads and writes in place, so nothing is allocated on a GPU that others have filled.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

from engram_client.cuda.driver import Driver
from engram_client.errors import DigestMismatch
from engram_client.layout import ROW_BYTES
from engram_client.lookup import nvrtc
from engram_server.device_fill import address_of
from engram_server.device_target import DeviceTarget, Span
from engram_server.load_job import PieceDigest

SOURCE: Final = Path(__file__).with_name("digest.cu")
KERNEL: Final = "digest_pieces"
PIECES_A_LAUNCH: Final = 4096
"""264 GiB: all that a GPU holds."""
GENTLE_PIECES: Final = 64
"""Half of an H200's multiprocessors get one more warp each, for about 20 ms."""
_SPAN = struct.Struct("<QQQ")
_DIGEST = struct.Struct("<QQ")
_WARP = 32


class Digester:
    """The kernel on one GPU, and room for the pieces of one launch: `Digester.on` gives the process's one a GPU."""

    _made: ClassVar[dict[tuple[Driver, int], Digester]] = {}
    _lock = threading.Lock()

    @classmethod
    def on(cls, driver: Driver, ordinal: int) -> Digester:
        """Compiled (or read from the cache) at the first call; never given back, as pinned memory must outlive
        what may read it. Raises CudaUnavailable, KernelCompileFailed or CudaCallFailed."""
        with cls._lock:
            if (driver, ordinal) not in cls._made:
                cls._made[driver, ordinal] = cls(driver, ordinal)
            return cls._made[driver, ordinal]

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        major, minor = (driver.attribute(ordinal, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        cubin = nvrtc.cubin(f"sm_{major}{minor}", source=SOURCE.read_text(encoding="utf-8"))
        driver.retain_context(ordinal)  # never released: the kernel stays loaded in it
        with driver.context(ordinal):
            self._kernel = driver.library_kernel(driver.library_load(cubin.code), KERNEL)
            self._stream = driver.stream_create()
            digests_at = PIECES_A_LAUNCH * _SPAN.size
            nbytes = -(-(digests_at + PIECES_A_LAUNCH * _DIGEST.size) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._memory = memoryview(mmap.mmap(-1, nbytes))
            address = address_of(self._memory)
            driver.host_register(address, nbytes, read_only=False)
            mapped = driver.host_device_pointer(address)
        self._spans, self._digests = self._memory[:digests_at], self._memory[digests_at:]
        self._parameters = (ctypes.c_uint64 * 2)(mapped, mapped + digests_at)
        self._pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(self._parameters) + 8 * k for k in range(2)))

    def digests(
        self, spans: Sequence[Span], gentle: bool = False, on_done: Callable[[int], None] = lambda nbytes: None
    ) -> list[bytes]:
        """xxh3-128 of each span's values and then its scales, as identity.new_digest gives it; spans have at least
        one row. `gentle`: a few at a time and with pauses, since others use the GPU too. `on_done` hears of bytes."""
        found: list[bytes] = []
        for part in _slices(spans, GENTLE_PIECES if gentle else PIECES_A_LAUNCH):
            started = time.monotonic()
            found += self._launch(part)
            on_done(sum(span.rows for span in part) * ROW_BYTES)
            if gentle and len(found) < len(spans):
                time.sleep(time.monotonic() - started)
        return found

    def _launch(self, spans: Sequence[Span]) -> list[bytes]:
        for index, span in enumerate(spans):
            _SPAN.pack_into(self._spans, index * _SPAN.size, *span)
        with self._driver.context(self._ordinal):
            pointers = ctypes.addressof(self._pointers)
            self._driver.launch(self._kernel, (len(spans), 1), _WARP, self._stream, pointers)
            self._driver.stream_synchronize(self._stream)
        words = (_DIGEST.unpack_from(self._digests, index * _DIGEST.size) for index in range(len(spans)))
        return [high.to_bytes(8) + low.to_bytes(8) for low, high in words]


def damage(
    work: Sequence[tuple[DeviceTarget, PieceDigest]],
    gentle: bool,
    on_done: Callable[[int], None] = lambda nbytes: None,
) -> list[DigestMismatch]:
    """Digests the pieces anew, GPU by GPU; every one that differs, by segment and rows."""
    found = []
    for ordinal in sorted({target.ordinal for target, _ in work}):
        mine = [(target, piece) for target, piece in work if target.ordinal == ordinal]
        spans = [target.span(piece.row_start, piece.row_stop) for target, piece in mine]
        digests = Digester.on(mine[0][0].driver, ordinal).digests(spans, gentle, on_done)
        found += [
            mismatch(target, piece, expected=piece.digest, found=digest)
            for (target, piece), digest in zip(mine, digests, strict=True)
            if digest != piece.digest
        ]
    return sorted(found, key=lambda one: (one.segment, one.row_start))


def mismatch(target: DeviceTarget, piece: PieceDigest, *, expected: bytes, found: bytes) -> DigestMismatch:
    return DigestMismatch(
        segment=target.info.id,
        row_start=piece.row_start,
        row_stop=piece.row_stop,
        expected=expected.hex(),
        found=found.hex(),
    )


def _slices(spans: Sequence[Span], size: int) -> Iterator[Sequence[Span]]:
    for start in range(0, len(spans), size):
        yield spans[start : start + size]
