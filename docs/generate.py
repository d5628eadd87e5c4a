"""Makes docs/configuration.md and docs/errors.md from the code: `python docs/generate.py [--check]`.

What a key means is its docstring in engram_server/config.py; what an error says is its template in
engram_client/errors/. --check writes nothing and exits 1 when a file is not what would be made.
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, without an installation

from engram_client import errors, strict  # noqa: E402
from engram_server import config  # noqa: E402

MADE = "<!-- Made by docs/generate.py from the code: change the code, then run it again. -->\n"


def main(arguments: list[str]) -> int:
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is out of date: run python docs/generate.py\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
    return 0


def pages() -> dict[Path, str]:
    return {ROOT / "docs" / "configuration.md": configuration_page(), ROOT / "docs" / "errors.md": errors_page()}


# Configuration


def configuration_page() -> str:
    parts = [
        f"""{MADE}
# Configuration

`engram-server --config engram.json [--engram-config JSON]`. The flag replaces the file's `engram_config` object
as a whole. Unknown keys, values of another type and values that contradict each other are refused: the message
names the key's path and what is allowed, and the exit code is 2.

A value of `null` below is JSON's null: the key may be left out.
""",
        section_table("engram.json", config.Config),
    ]
    for field in msgspec.structs.fields(config.Config):
        section = section_of(field.type)
        if section is not None:
            parts.append(section_table(field.name, section))
    parts.append(deprecated_table())
    return "\n".join(parts)


def section_table(title: str, kind: type[msgspec.Struct]) -> str:
    meanings = docstrings_of(kind)
    prefix = "" if kind is config.Config else f"{title}."
    lines = [f"## {title}\n", f"{kind.__doc__}\n", "| key | default | values | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        section = section_of(field.type)
        values = f"[an object](#{field.name})" if section else cell(strict.describe(field.type))
        lines.append(f"| `{prefix}{field.name}` | {default_of(field)} | {values} | {cell(meanings[field.name])} |")
    return "\n".join(lines) + "\n"


def section_of(kind: Any) -> type[msgspec.Struct] | None:
    parts = (kind, *getattr(kind, "__args__", ()))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    value = msgspec.to_builtins(field.default)
    return "" if isinstance(value, dict) else f"`{json.dumps(value)}`"


def docstrings_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field. Python keeps none of them, so they are read from the source."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def deprecated_table() -> str:
    host, layout, peer = config.HOST_TABLE, config.LAYOUT, config.PEER_SHARDS
    cases: list[dict[str, str]] = [
        {host: "1"},
        {host: "1", layout: "per_rank"},
        {host: "1", layout: "shared"},
        {layout: "shared"},
        {peer: "1"},
        {peer: "1", host: "1"},
    ]
    lines = [
        """## Deprecated variables

SGLang's variables count only when neither the file nor the flag gives an `engram_config`; then the daemon warns
and prints the object to write instead. Booleans are `true`, `1`, `yes`, `y`, `false`, `0`, `no`, `n` in any case;
anything else is warned about and counts as false, as in SGLang. One thing differs: SGLang 0.5.23 took `shared` as
the layout when none was given, and this daemon takes `per_rank`; it says so when that matters.
""",
        "| variables | `engram_config` |",
        "|---|---|",
    ]
    for environ in cases:
        names = ", ".join(f"`{name}={value}`" for name, value in environ.items())
        lines.append(f"| {names} | `{json.dumps(config.from_deprecated_variables(environ).engram_config)}` |")
    return "\n".join(lines) + "\n"


# Errors


def errors_page() -> str:
    parts = [
        f"""{MADE}
# Errors

Every failure is a class of `engram_client.errors` with typed fields. The daemon sends the class's name and the
fields; the client raises the same class. Test for the class and its fields, not for the text.

| exit code | of `engram-server` and `engram-ctl` |
|---|---|
| {errors.EXIT_OK} | done; the daemon has drained |
| {errors.EXIT_CONFIG} | configuration (`ConfigError`) |
| {errors.EXIT_RESOURCES} | the machine has not enough of something (`ResourceError`) |
| {errors.EXIT_CHECKPOINT} | checkpoint (`CheckpointError`) |
| {errors.EXIT_ALREADY_RUNNING} | another daemon runs (`AlreadyRunning`) |
| {errors.EXIT_OTHER} | anything else |

A service manager should not restart the daemon on {errors.EXIT_CONFIG}, {errors.EXIT_CHECKPOINT} and \
{errors.EXIT_ALREADY_RUNNING}: it would end the same way.
"""
    ]
    for family in [errors.EngramError, *errors.EngramError.__subclasses__()]:
        leaves = [kind for kind in family.__subclasses__() if kind.template]
        if not leaves:
            continue
        title = "Errors of no family" if family is errors.EngramError else family.__name__
        parts.append(f"## {title}\n\n{family.__doc__}\n\n| error | exit code | message | fields |\n|---|---|---|---|")
        parts[-1] += "".join(f"\n{error_row(kind)}" for kind in leaves) + "\n"
    return "\n".join(parts)


def error_row(kind: type[errors.EngramError]) -> str:
    fields = ", ".join(f"`{name}`: {type_}" for name, type_ in kind.field_types.items())
    message = kind.template.replace("{{", "{").replace("}}", "}")
    return f"| `{kind.__name__}` | {kind.exit_code} | {cell(message)} | {cell(fields)} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
