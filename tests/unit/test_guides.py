"""The hand-written guides name commands, files, errors and keys that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engram_client import errors

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
NAMES = {path.name for path in GUIDES}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_every_link_and_every_file_named_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for name in re.findall(r"\b(deploy/[\w./-]+\w)", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_every_command_of_engram_ctl_is_one(path: Path) -> None:
    known = subprocess.run(
        [sys.executable, "-m", "engram_server.ctl", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
    for command in re.findall(r"engram-ctl ([a-z][a-z-]+)", text):
        assert re.search(rf"^    {command}\b", known, re.MULTILINE), command


def test_the_guide_to_trouble_names_errors_that_exist() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = [
        name for row in text.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    classes = [name for name in named if name[0].isupper()]
    assert len(classes) > 15
    assert set(classes) <= set(errors.BY_CODE)


def test_the_examples_are_all_in_the_guide_to_choosing() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([\w-]+\.json)`", text)) == {
        path.name for path in (ROOT / "deploy/examples").glob("*.json")
    }


def test_the_readme_leads_to_every_guide() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in NAMES if f"docs/{name}" not in text} == set()
