"""Gathers what tests/sglang/requirements.txt names into a folder, for a machine where nothing can be downloaded.

    python -m tests.sglang.gather_wheels FOLDER --python 3.12 --leave-out numpy torch ...

For run_gpu.sh there. SGLang itself becomes a small wheel of its Python files and kernel sources: its published wheels
are for one Python each because of compiled extensions that the Engram layer does not use.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PLATFORMS = ["2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5"]
OLD_PLATFORMS = ["manylinux2014", "manylinux1"]
LEFT_OUT_OF_SGLANG = ("sglang/multimodal_gen/", "sglang/test/", "sglang/benchmark/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--leave-out", nargs="*", default=[], help="packages that are already there")
    parser.add_argument("--sglang", type=Path, help="a wheel of sglang of any Python, if already here")
    options = parser.parse_args()
    left_out = {normal(name) for name in options.leave_out}
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    wanted = [line for line in lines if normal(line.split("==")[0]) not in left_out | {"sglang"}]
    options.folder.mkdir(parents=True, exist_ok=True)
    download(options.folder, options.python, wanted)
    with tempfile.TemporaryDirectory() as name:
        wheel = options.sglang
        if wheel is None:
            download(Path(name), "3.11", [next(line for line in lines if line.startswith("sglang=="))])
            (wheel,) = Path(name).glob("sglang-*.whl")
        shrink(wheel, options.folder)
    nbytes = sum(path.stat().st_size for path in options.folder.glob("*.whl"))
    print(f"{nbytes / 2**20:.1f} MiB in {options.folder}")
    return 0


def normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def download(folder: Path, python: str, requirements: list[str]) -> None:
    platforms = [f"manylinux_{glibc}_x86_64" for glibc in ("2_34", *PLATFORMS)]
    platforms += [f"{name}_x86_64" for name in OLD_PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [argument for platform in platforms for argument in ("--platform", platform)]
    subprocess.run([*command, *requirements], check=True)


def shrink(wheel: Path, folder: Path) -> None:
    """Writes a wheel for any Python 3 into the folder."""
    name = "-".join(wheel.name.split("-")[:2])
    records = []
    with (
        zipfile.ZipFile(wheel) as whole,
        zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as small,
    ):
        for path in whole.namelist():
            if not is_kept(path):
                continue
            content = whole.read(path)
            if path.endswith(".dist-info/WHEEL"):
                content = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            small.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            records.append(f"{path},sha256={digest},{len(content)}")
        record = f"{name}.dist-info/RECORD"
        small.writestr(record, "\n".join([*records, f"{record},,", ""]))


def is_kept(path: str) -> bool:
    if path.startswith(LEFT_OUT_OF_SGLANG) or path.endswith("/RECORD"):
        return False
    # Kernel sources too: SGLang looks for their folder when it is imported.
    source = path.startswith("sglang/kernels/") and not path.endswith((".json", ".md"))
    return path.endswith(".py") or source or ".dist-info/" in path


if __name__ == "__main__":
    sys.exit(main())
