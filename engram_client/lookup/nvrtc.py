"""Compiles the kernels' sources with NVRTC through cuda.core, and keeps the cubins on disk.

No toolkit and no header is needed. A cubin's file name is the digest of all that shaped it: source, options,
architecture, NVRTC's version. Ranks that start together may each compile it; each writes its own temporary
file and renames it, so a reader sees a whole cubin or none. Files carry a digest of their content: a file
that a full disk cut short is compiled again. The cache is a convenience: where it cannot be read or written,
the kernels are compiled in memory.

The folder is $ENGRAM_KERNEL_CACHE, else engram-table-server in $XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from engram_client.errors import CudaUnavailable, KernelCompileFailed

SOURCES = tuple(Path(__file__).with_name(name) for name in ("gather.cu", "ordered.cu"))
CACHE_VARIABLE = "ENGRAM_KERNEL_CACHE"
_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


class Cubin(NamedTuple):
    """Machine code for one architecture. `log` is what ptxas said: empty when it came from the cache."""

    code: bytes
    cached: bool
    log: str


def cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "engram-table-server"


def read_source() -> str:
    """The sources in one piece, as NVRTC takes them: it needs no include path then."""
    return "".join(f'#line 1 "{path.name}"\n{path.read_text()}' for path in SOURCES)


def cubin(arch: str, *, folder: Path | None = None, source: str | None = None) -> Cubin:
    """The kernels for `arch` ("sm_90"), from the cache in `folder` or compiled and put there. `source`: None for
    those of the lookups.

    Raises CudaUnavailable when cuda.core or NVRTC is missing, KernelCompileFailed when NVRTC refuses.
    """
    source = read_source() if source is None else source
    path = (folder or cache_folder()) / f"{arch}-{_key(source, arch)}.cubin"
    code = _read(path)
    if code is not None:
        return Cubin(code, cached=True, log="")
    code, log = compile_source(source, arch)
    _write(path, code)
    return Cubin(code, cached=False, log=log)


def nvrtc_version() -> str:
    """As "13.0". Raises CudaUnavailable when NVRTC cannot be loaded."""
    try:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CudaUnavailable(
            problem=f"NVRTC cannot be loaded ({error})", remedy="install engram-table-server[cuda]"
        ) from error
    if int(code) != 0:
        raise CudaUnavailable(problem=f"nvrtcVersion gave {code.name}", remedy="reinstall nvidia-cuda-nvrtc")
    return f"{major}.{minor}"


def compile_source(source: str, arch: str) -> tuple[bytes, str]:
    """Compiles `source` to a cubin; returns it and ptxas's report on resources."""
    version = nvrtc_version()
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise CudaUnavailable(
            problem=f"cuda.core cannot be imported ({error})", remedy="install engram-table-server[cuda]"
        ) from error
    log = io.StringIO()
    try:
        # ftz stays off: subnormal bfloat16 results are part of the value rule.
        options = ProgramOptions(std="c++17", arch=arch, ftz=False, ptxas_options="-v")
        compiled = Program(source, code_type="c++", options=options).compile("cubin", logs=log)
    except Exception as error:  # cuda.core raises classes of its own, which differ from version to version
        raise KernelCompileFailed(
            nvrtc=version,
            arch=arch,
            log=str(error) + log.getvalue(),
            remedy="a GPU newer than NVRTC needs a newer nvidia-cuda-nvrtc; otherwise report this",
        ) from error
    return bytes(compiled.code), log.getvalue()


def _key(source: str, arch: str) -> str:
    parts = ("engram-cubin-1", source, arch, "std=c++17 ftz=false", nvrtc_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
        # Machine code that another user could have put there is not run.
        if path.stat().st_uid not in (os.getuid(), 0):
            return None
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning("kernels are compiled at every start: cannot write %s: %s", path, error)
