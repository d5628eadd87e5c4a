"""engram.json: every option once, validated before any side effect.

`load_config` is the only way in. It returns one frozen `Config` or raises one of errors.ConfigError, with
the path of the key and the values it may have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from engram_client.errors import ConfigContradiction, ConfigInvalid, ConfigNotJson, ConfigUnreadable
from engram_client.protocol import (
    DEFAULT_ENDPOINT,
    Lookup,
    Placement,
    Replication,
    handover_path,
    ipc_path,
)

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class EngramConfig(_Section, frozen=True):
    """The object of SGLang's `--engram-config`."""

    placement: Placement = Placement.GPU
    replication: Replication = Replication.NONE
    lookup: Lookup | None = None
    """None = not given = collective; only an explicit value that has no effect is remarked on."""


class HostConfig(_Section, frozen=True):
    """Host memory."""

    backing: Literal["auto", "memfd", "posix_shm", "file", "cuda_host"] = "auto"
    path: str | None = None
    """Folder of a tmpfs or hugetlbfs for backing file."""
    huge_pages: Literal["auto", "hugetlb", "thp", "off"] = "auto"
    """auto: hugetlb pages if the pool has them, else THP, else base pages; the others insist."""
    numa: str = "none"
    """none, interleave, or a node list such as "0" or "0-1" to bind to."""
    memory_check: Literal["strict", "warn", "off"] = "strict"


class ControlConfig(_Section, frozen=True):
    """Sockets, and who may use them."""

    endpoint: str = DEFAULT_ENDPOINT
    handover: str | None = None
    mode: Annotated[str, msgspec.Meta(pattern="^0[0-7]{3}$")] = "0600"
    uids: tuple[Natural, ...] = ()
    gids: tuple[Natural, ...] = ()


class LoadConfig(_Section, frozen=True):
    """How the checkpoint is read."""

    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Reader threads; 0 = one a core, at most 16."""
    direct_io: Literal["auto", "on", "off"] = "auto"
    """auto: direct unless the file is in the page cache already or its file system refuses."""
    verify: Literal["off", "sample", "full"] = "sample"
    """How much of the memory is digested again after the load."""


class MetricsConfig(_Section, frozen=True):
    listen: str | None = None
    """host:port of the metrics and status page; null = off."""


class Config(_Section, frozen=True):
    """The whole of engram.json."""

    model_path: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    geometry: dict[str, Any] | None = None
    """engram_* keys as in a text_config, for load_format dummy without a model_path."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 63)] = 0
    """Seed of the dummy generator."""
    engram_config: EngramConfig | None = None
    tp_size: Positive | None = None
    nnodes: Positive = 1
    node_rank: Natural = 0
    devices: tuple[int | str, ...] | None = None
    host: HostConfig = HostConfig()
    control: ControlConfig = ControlConfig()
    load: LoadConfig = LoadConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def engram(self) -> EngramConfig:
        return self.engram_config or EngramConfig()


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and what the user should be told about how it came to be, one sentence each."""

    config: Config
    remarks: tuple[str, ...]


def load_config(path: str | Path, engram_config: str | None, environ: Mapping[str, str]) -> LoadedConfig:
    """Reads `path`, puts the JSON text of `--engram-config` in place of its object, applies the deprecated
    variables when neither gives one, and checks the whole.

    Raises ConfigUnreadable, ConfigNotJson, ConfigInvalid, ConfigContradiction or SocketPathInvalid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigUnreadable(path=str(path), problem=getattr(error, "strerror", None) or str(error)) from error
    raw = parse_json(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigInvalid(where=str(path), path="$", problem=f"is {_json_type(raw)}", allowed="an object")
    remarks: list[str] = []
    if engram_config is not None:
        raw = {**raw, "engram_config": parse_json(engram_config, "--engram-config")}
        convert(raw["engram_config"], EngramConfig, "--engram-config")
    if raw.get("engram_config") is None:
        deprecated = from_deprecated_variables(environ)
        if deprecated is not None:
            raw = {**raw, "engram_config": deprecated.engram_config}
            remarks.append(deprecated.warning)
    config = convert(raw, Config, str(path))
    return LoadedConfig(config, (*remarks, *check(config, str(path))))


def check(config: Config, where: str) -> tuple[str, ...]:
    """Refuses combinations that contradict each other; returns remarks on values that have no effect."""
    engram = config.engram
    remarks = []
    if engram.lookup is Lookup.PEER_READ and engram.placement is Placement.CPU:
        raise ConfigContradiction(
            keys='engram_config.lookup "peer_read" and engram_config.placement "cpu"',
            reason="peer_read reads shards in other GPUs' memory",
            remedy='leave lookup out, or set placement to "gpu"',
        )
    if engram.lookup is Lookup.PEER_READ and engram.replication is Replication.PER_NODE:
        raise ConfigContradiction(
            keys='engram_config.lookup "peer_read" and engram_config.replication "per_node"',
            reason="with per_node every rank maps the whole table and has no peer to read",
            remedy='leave lookup out, or set replication to "none"',
        )
    if engram.lookup is Lookup.COLLECTIVE and engram.replication is Replication.PER_NODE:
        remarks.append('lookup "collective" has no effect with replication "per_node": every rank maps all rows')
    if engram.lookup is Lookup.PEER_READ and config.tp_size == 1:
        remarks.append('lookup "peer_read" has no effect at tp_size 1: the one rank owns all rows')
    if config.model_path is None and config.load_format == "auto":
        _refuse(
            where,
            "model_path",
            "is missing",
            'a checkpoint\'s folder (only load_format "dummy" goes without)',
        )
    if config.load_format == "dummy" and (config.model_path is None) == (config.geometry is None):
        raise ConfigContradiction(
            keys='load_format "dummy", model_path and geometry',
            reason="the dummy tables take their shape from exactly one of model_path and geometry",
            remedy="give one of the two",
        )
    if config.load_format == "auto" and config.geometry is not None:
        raise ConfigContradiction(
            keys='geometry and load_format "auto"',
            reason="a real checkpoint brings its own geometry",
            remedy='remove geometry, or set load_format to "dummy"',
        )
    if config.node_rank >= config.nnodes:
        _refuse(where, "node_rank", f"is {config.node_rank}", f"0 to nnodes - 1 = {config.nnodes - 1}")
    if config.tp_size is not None and config.tp_size % config.nnodes:
        raise ConfigContradiction(
            keys=f"tp_size {config.tp_size} and nnodes {config.nnodes}",
            reason="every node holds the same number of ranks",
            remedy="make tp_size a multiple of nnodes",
        )
    if config.devices is not None and (len(set(config.devices)) != len(config.devices) or not config.devices):
        _refuse(where, "devices", "is empty or names a device twice", "distinct indices or UUIDs, or null for all")
    if (config.host.backing == "file") != (config.host.path is not None):
        raise ConfigContradiction(
            keys=f'host.backing "{config.host.backing}" and host.path {json.dumps(config.host.path)}',
            reason='backing "file" needs the folder of a tmpfs or hugetlbfs, and only it has one',
            remedy="give both or neither",
        )
    if not re.fullmatch(r"none|interleave|\d+(-\d+)?(,\d+(-\d+)?)*", config.host.numa):
        _refuse(
            where,
            "host.numa",
            f'is "{config.host.numa}"',
            '"none", "interleave" or a node list such as "0-1"',
        )
    control = ipc_path(config.control.endpoint)
    if handover_path(config.control.endpoint, config.control.handover) == control:
        _refuse(where, "control.handover", "is the control socket's own path", "another path, or null")
    if (config.control.uids or config.control.gids) and int(config.control.mode, 8) & 0o077 == 0:
        remarks.append(
            f"control.uids and control.gids let others in, but control.mode {config.control.mode} does not: "
            'set it to "0660" or "0666"'
        )
    return tuple(remarks)


def _refuse(where: str, path: str, problem: str, allowed: str) -> None:
    raise ConfigInvalid(where=where, path=path, problem=problem, allowed=allowed)


# Deprecated variables of SGLang

_HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
_LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"
_PEER_SHARDS = "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS"
_TRUE, _FALSE = ("true", "1", "yes", "y"), ("false", "0", "no", "n")


@dataclass(frozen=True)
class Deprecated:
    engram_config: dict[str, str]
    warning: str


def from_deprecated_variables(environ: Mapping[str, str]) -> Deprecated | None:
    """What SGLang's old variables ask for, or None when they ask for nothing.

    PEER_SHARDS wins over HOST_TABLE, as it did in SGLang; LAYOUT alone has no effect.
    Raises ConfigInvalid for a boolean or a layout that SGLang would not read.
    """
    layout = environ.get(_LAYOUT)
    if layout is not None and layout not in ("per_rank", "shared"):
        _refuse("environment", _LAYOUT, f'is "{layout}"', '"per_rank" or "shared"')
    used = [name for name in (_HOST_TABLE, _LAYOUT, _PEER_SHARDS) if name in environ]
    engram: dict[str, str] = {}
    if _boolean(environ, _PEER_SHARDS):
        engram = {"lookup": "peer_read"}
    elif _boolean(environ, _HOST_TABLE):
        engram = {"placement": "cpu"}
        if layout == "shared":
            engram["replication"] = "per_node"
    if not engram:
        return None
    return Deprecated(
        engram,
        f'{", ".join(used)} {"is" if len(used) == 1 else "are"} deprecated; write "engram_config": '
        f"{json.dumps(engram)} instead",
    )


def _boolean(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "false").lower()
    if value not in _TRUE + _FALSE:
        _refuse("environment", name, f'is "{environ[name]}"', ", ".join(_TRUE + _FALSE))
    return value in _TRUE


# Strict parsing, with the key's path and the allowed values in every refusal

_S = TypeVar("_S")


def parse_json(text: str, where: str) -> Any:
    """Strict JSON: no duplicate keys, no NaN. Raises ConfigNotJson or ConfigInvalid."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                _refuse(where, key, "is given twice", "each key once")
        return dict(pairs)

    def constant(name: str) -> Any:
        raise ConfigNotJson(where=where, problem=f"{name} is not a JSON number", line=0, column=0)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ConfigNotJson(where=where, problem=error.msg, line=error.lineno, column=error.colno) from error
    except RecursionError as error:
        raise ConfigNotJson(where=where, problem="is nested too deeply", line=0, column=0) from error


def convert(raw: Any, kind: type[_S], where: str) -> _S:
    """`raw` as `kind`, nothing coerced. Raises ConfigInvalid with the offending key's path."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$")
        keys = [key for key in at.rstrip("`").split(".") if key and not key.startswith("[")]
        unknown = re.match(r"Object contains unknown field `(.*)`", problem)
        target = _descend(kind, keys)
        allowed = describe(target)
        if unknown:
            keys.append(unknown[1])
            problem = "is not a known key"
        raise ConfigInvalid(where=where, path=".".join(keys) or "$", problem=problem, allowed=allowed) from error


def _descend(kind: Any, keys: list[str]) -> Any:
    for key in keys:
        section = next((part for part in (kind, *get_args(kind)) if _is_section(part)), None)
        field = (
            next((f for f in msgspec.structs.fields(section) if f.name == re.sub(r"\[.*", "", key)), None)
            if section
            else None
        )
        if field is None:
            return kind
        kind = field.type
    return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def describe(kind: Any) -> str:
    """A type of this file in a user's words: "auto" or "dummy"; an integer of at least 1; null."""
    if kind is type(None):
        return "null"
    if _is_section(kind):
        return "the keys " + ", ".join(field.name for field in msgspec.structs.fields(kind))
    if isinstance(kind, type) and issubclass(kind, str) and hasattr(kind, "__members__"):
        return " or ".join(f'"{member.value}"' for member in kind)  # type: ignore[attr-defined]
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    if origin is Annotated:
        base, *meta = get_args(kind)
        bounds = [f"at least {m.ge}" for m in meta if m.ge is not None]
        bounds += [f"at most {m.le}" for m in meta if m.le is not None]
        bounds += [f"matching {m.pattern}" for m in meta if m.pattern is not None]
        return f"{describe(base)} {' and '.join(bounds)}".strip()
    if origin is tuple:
        return f"a list of {describe(get_args(kind)[0])}"
    if get_args(kind) and origin is not dict:
        return " or ".join(describe(part) for part in get_args(kind))
    return {str: "a string", int: "an integer", bool: "true or false"}.get(kind, "an object")


def _json_type(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
