"""The hand-written guides name commands, files, errors and keys that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engram_client import errors
from engram_client import sglang as plugin
from engram_client.layout import ROW_BYTES, TableGeometry, column_primes, shard

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


def test_the_bytes_on_each_gpu_are_those_of_the_shard_rule_over_the_released_tables() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    columns = column_primes(2, 3, 8, 16_000_000)
    tables = [TableGeometry(layer_id=layer, columns=each) for layer, each in zip((1, 14), columns, strict=True)]
    rows = {
        name: re.findall(r"[\w.]+", re.search(rf"\| {name} \|(.*)", text)[1])
        for name in ("TP", "GiB a GPU", "split by")
    }  # type: ignore[index]
    assert {"2", "3", "4", "5", "8", "16", "32", "72"} <= set(rows["TP"])
    for size, printed, split in zip(rows["TP"], rows["GiB a GPU"], rows["split by"], strict=True):
        shards = [[shard(table, rank, int(size)) for table in tables] for rank in range(int(size))]
        largest = max(sum(each.rows for each in one) for one in shards) * ROW_BYTES
        assert printed == f"{largest / 2**30:.2f}"
        assert split == ("columns" if shards[0][0].columns else "rows")


def test_the_guide_to_sglang_names_what_is_hooked_and_the_release_that_was_tested() -> None:
    text = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    hooked = {f"{plugin.LAYER_MODULE}.{plugin.EMBEDDING}.{name}" for name in plugin.HOOKED}
    assert set(re.findall(r"^\| `(sglang\.[\w.]+)` \|", text, re.MULTILINE)) == hooked
    assert plugin.SUPPORTED in text
    assert f"sglang=={plugin.SUPPORTED}\n" in (ROOT / "tests" / "sglang" / "requirements.txt").read_text()
    assert f"SGLang {plugin.SUPPORTED}" in (ROOT / "README.md").read_text(encoding="utf-8")
