"""The documents say what the code does: tables that can be compared with the code are compared."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engram_client import api, errors, protocol
from engram_client.identity import TableIdentity
from engram_client.layout import BLOCK_ROWS, ROW_BYTES, RowFormat
from engram_server.config import Config, EngramConfig

DOCS = Path(__file__).parents[2] / "docs"
INTERFACES = (DOCS / "interfaces.md").read_text(encoding="utf-8")


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the tables between one heading and the next."""
    section = INTERFACES.split(f"\n{heading}\n", 1)[1]
    section = re.split(r"\n#+ ", section, maxsplit=1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def test_the_generated_pages_are_what_the_generator_makes() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_key_and_every_error_is_on_its_generated_page() -> None:
    configuration = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for name, value in msgspec.to_builtins(Config(engram_config=EngramConfig())).items():
        assert f"| `{name}` |" in configuration
        for key in value if isinstance(value, dict) else ():
            assert f"| `{name}.{key}` |" in configuration
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    for kind in errors.BY_CODE.values():
        assert (f"| `{kind.__name__}` | {kind.exit_code} |" if kind.template else f"## {kind.__name__}\n") in page


def test_the_printed_engram_json_is_the_default_configuration() -> None:
    (printed,) = re.findall(r"```json\n(.*?)```", INTERFACES, re.DOTALL)
    assert json.loads(printed) == json.loads(msgspec.json.encode(Config()))


def test_the_engram_config_table_has_every_key_value_and_default() -> None:
    table = {words(row[0])[0]: words(row[1]) for row in rows_of("## engram.json")[2:]}
    assert table == {
        "placement": [str(value) for value in protocol.Placement],
        "replication": [str(value) for value in protocol.Replication],
        "lookup": [str(value) for value in protocol.Lookup],
    }
    assert {name: values[0] for name, values in table.items()} == {
        "placement": EngramConfig().placement,
        "replication": EngramConfig().replication,
        "lookup": protocol.Lookup.COLLECTIVE,
    }


def test_the_exit_codes_are_the_codes_of_the_errors() -> None:
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert [row[0] for row in rows_of("## Exit codes")[2:]] == [str(code) for code in sorted(codes.values())]


def test_the_error_families_are_all_there_with_their_exit_codes() -> None:
    families = [kind for kind in errors.EngramError.__subclasses__() if not kind.template]
    listed = {words(row[0])[0]: row[1] for row in rows_of("## Errors")[2:]}
    assert listed == {kind.__name__: str(kind.exit_code) for kind in families}
    loners = [kind.__name__ for kind in errors.EngramError.__subclasses__() if kind.template]
    section = INTERFACES.split("\n## Errors\n")[1].split("\n## ")[0]
    assert all(f"`{name}`" in section for name in loners)


def test_every_message_is_listed_with_its_fields_socket_and_sender() -> None:
    senders = {
        "control": (protocol.Request, protocol.Reply),
        "handover": (protocol.HandoverRequest, protocol.HandoverReply),
    }
    expected: dict[str, tuple[str, str, list[str]]] = {}
    for socket, (requests, replies) in senders.items():
        for sender, union in (("client", requests), ("daemon", replies)):
            for kind in getattr(union, "__args__", (union,)):
                tag = kind.__struct_config__.tag
                where = "both" if tag in expected else socket
                expected[tag] = (where, sender, list(kind.__struct_fields__))
    listed = {
        words(row[0])[0]: (row[1], row[2], words(row[3]))
        for row in rows_of("## Sockets")[2:]
        if row[0][:1] == "`" and len(row) == 4
    }
    assert listed == expected


def test_the_limits_are_those_of_the_code() -> None:
    text = " ".join(" ".join(row) for row in rows_of("## Sockets"))
    for value in (
        f"request on the control socket {protocol.MAX_REQUEST_BYTES} bytes",
        f"reply on the control socket {protocol.MAX_REPLY_BYTES} bytes",
        f"message on the handover socket {protocol.MAX_HANDOVER_BYTES} bytes",
        f"descriptors a message {protocol.MAX_FDS_PER_MESSAGE}",
        f"ticket {protocol.TICKET_BYTES} bytes, valid for {protocol.TICKET_LIFETIME_S:g} s, once",
    ):
        assert value in text
    assert f"at most {protocol.MAX_SOCKET_PATH} bytes" in INTERFACES
    assert f"nesting deeper than {protocol.MAX_DEPTH}" in INTERFACES
    assert f"`v` (the version, {protocol.PROTOCOL_VERSION})" in INTERFACES
    assert ", ".join(f"`{state}`" for state in protocol.State) in INTERFACES


def test_rows_and_blocks_have_the_sizes_of_the_code() -> None:
    assert [words(row[0])[0] for row in rows_of("## Rows")[2:]] == [str(kind) for kind in RowFormat]
    assert f"{ROW_BYTES} bytes" in INTERFACES
    assert f"A block is {BLOCK_ROWS} table rows" in INTERFACES
    assert TableIdentity.__name__ in INTERFACES


def test_the_signature_of_connect_is_the_one_of_the_code() -> None:
    printed = INTERFACES.split("engram_client.connect(\n")[1].split("\n) -> Client")[0]
    parameters: dict[str, Any] = dict(
        pair.partition("=")[::2] for pair in re.findall(r"[\w*]+(?:=[^,\n]+)?", printed) if pair != "*"
    )
    signature = inspect.signature(api.Connect.__call__).parameters
    assert list(parameters) == [name for name in signature if name != "self"]
    for name, default in parameters.items():
        actual = signature[name].default
        if actual is not ...:  # the endpoint's default is a constant, checked below
            assert default == ("" if actual is inspect.Parameter.empty else repr(actual).replace("'", '"'))
    assert parameters["endpoint"] == json.dumps(protocol.DEFAULT_ENDPOINT)


@pytest.mark.parametrize("kind", [api.Client, api.Table], ids=lambda kind: kind.__name__)
def test_every_public_name_of_the_client_is_listed(kind: Any) -> None:
    names = [name for name in vars(kind) if not name.startswith("_")]
    assert names
    section = INTERFACES.split("\n## The client\n")[1].split("\n## ")[0]
    assert all(re.search(rf"`{name}\b", section) for name in names)


def test_lookup_is_printed_as_it_is() -> None:
    parameters = inspect.signature(api.Table.lookup).parameters.values()
    shown = [
        name.name + ("" if name.default is inspect.Parameter.empty else f"={name.default!r}".replace("'", '"'))
        for name in parameters
        if name.name != "self"
    ]
    shown.insert(2, "*")
    assert f"`lookup({', '.join(shown)})`" in INTERFACES
