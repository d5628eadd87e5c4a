"""Who may import whom, and what an import may cost.

An import of torch takes seconds and hundreds of megabytes: the daemon must be back at once after a restart,
and a client's vocabulary is used by tools that never touch a tensor.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VOCABULARY = ("", ".protocol", ".endpoint", ".errors", ".layout", ".identity", ".strict", ".api")

LOADER_CHILD = frozenset(
    f"engram_server.{name}"
    for name in (
        "load_child",
        "check_child",
        "device_digest",
        "device_fill",
        "device_load",
        "fill",
        "reader",
        "verify",
        "generate",
        "make_checkpoint",
        "forecast",
        "doctor",
    )
)
"""Modules of the loader child and of tools that do its work: they use numpy, and nothing that the daemon
imports may import them."""


def modules_of(package: str) -> list[str]:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / package).rglob("*.py")]
    return sorted(name.removesuffix(".__init__") for name in names)


def imported_by(path: Path) -> set[str]:
    """Every module named by an import statement, at any depth of the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def loaded_after(*modules: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after importing `modules`."""
    code = f"import sys, json, {', '.join(modules)}; print(json.dumps([m.partition('.')[0] for m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("path", sorted((ROOT / "engram_client").rglob("*.py")), ids=lambda path: path.stem)
def test_the_client_never_imports_the_server(path: Path) -> None:
    names = imported_by(path)
    assert not {name for name in names if name.split(".")[0] == "engram_server"}
    assert not {name for name in names if name.startswith(".")}, "imports are absolute, so that this test sees them"


def test_the_clients_vocabulary_loads_neither_torch_nor_numpy() -> None:
    loaded = loaded_after(*(f"engram_client{name}" for name in VOCABULARY))
    assert not loaded & {"torch", "engram_server", "cuda", "numpy"}


def test_importing_the_client_loads_no_torch() -> None:
    assert not loaded_after("engram_client") & {"torch", "engram_server", "cuda"}


def test_the_configuration_loads_no_numpy() -> None:
    assert not loaded_after("engram_server.config") & {"torch", "numpy", "cuda"}


def test_a_starting_daemon_loads_nothing_that_only_some_daemons_or_commands_need() -> None:
    """Each of these would make every start, and a restart's gap, longer."""
    later = {"pynvml", "prometheus_client", "http", "rich", "psutil", "matplotlib"}
    assert not loaded_after("engram_server.cli") & later


@pytest.mark.parametrize("module", modules_of("engram_server"))
def test_no_module_of_the_server_loads_torch_and_only_the_loader_child_loads_numpy(module: str) -> None:
    if module == "engram_server.bench":
        return  # it is a rank, in a command of its own
    forbidden = {"torch"} if module in LOADER_CHILD else {"torch", "numpy"}
    assert not loaded_after(module) & forbidden


def test_the_vocabulary_listed_here_exists() -> None:
    assert {f"engram_client{name}" for name in VOCABULARY} <= set(modules_of("engram_client"))
