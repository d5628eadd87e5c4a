"""engram.json: every option once, validated before any side effect.

`load_config` is the only way in. It returns one frozen `Config` or raises one of errors.ConfigError, with
the path of the key and the values it may have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

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
from engram_client.strict import convert, describe, shown

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
UserId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 2)]
"""2**32 - 1 is the kernel's "no such user"."""
Text = Annotated[str, msgspec.Meta(min_length=1, description="a string that is not empty")]
Mode = Annotated[str, msgspec.Meta(pattern=r"^0[0-7]{3}\Z", description='an octal mode such as "0600"')]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """docs/configuration.md is made from the docstrings below each key."""


class EngramConfig(_Section, frozen=True):
    """The object of SGLang's `--engram-config`. Every combination returns the same rows, bit for bit."""

    placement: Placement = Placement.GPU
    """`gpu`: device memory. `cpu`: host memory that the GPU reads in place."""
    replication: Replication = Replication.NONE
    """`none`: rows are split over the TP group. `per_node`: the node holds the whole table, mapped by every rank."""
    lookup: Lookup | None = None
    """`collective` (null means it): rows are assembled by a collective. `peer_read`: a rank reads the owner's
    shard directly; only with placement `gpu` and replication `none`."""


class HostConfig(_Section, frozen=True):
    """Host memory."""

    backing: Literal["auto", "memfd", "posix_shm", "file", "cuda_host"] = "auto"
    """What the tables lie in. `auto` chooses for this machine and logs why."""
    path: Text | None = None
    """Folder of a tmpfs or hugetlbfs, for backing `file` and only for it."""
    huge_pages: Literal["auto", "hugetlb", "thp", "off"] = "auto"
    """`auto`: hugetlb pages if the pool has them, else THP, else base pages; the others insist."""
    numa: str = "none"
    """`none`, `interleave`, or a node list such as `0` or `0-1` to bind to."""
    memory_check: Literal["strict", "warn", "off"] = "strict"
    """When memory looks short: `strict` refuses, `warn` goes on (virtual machines that grow their memory report
    too little), `off` does not look."""
    keep: Literal["auto", "off"] = "auto"
    """Whether tables outlive the daemon. `auto`: yes, where the next one can find them: in a named backing
    (`posix_shm`, `file`), or in the service manager's store; `engram-ctl purge` frees them. `off`: they end with it."""


class ControlConfig(_Section, frozen=True):
    """Sockets, and who may use them."""

    endpoint: str = DEFAULT_ENDPOINT
    """Control socket, `ipc://` and an absolute path."""
    handover: str | None = None
    """Path of the descriptor socket; null = the control socket's path and `.handover`."""
    mode: Mode = "0600"
    """Mode of both sockets."""
    uids: tuple[UserId, ...] = ()
    """Users that may attach besides the daemon's own, which always may."""
    gids: tuple[UserId, ...] = ()
    """Groups that may attach."""


class LoadConfig(_Section, frozen=True):
    """How the checkpoint is read."""

    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Reader threads, shared out among the GPUs that are filled; 0 = one a core, at most 16, or 16 a GPU."""
    direct_io: Literal["auto", "on", "off"] = "auto"
    """`auto`: direct unless the file is in the page cache already or its file system refuses."""
    verify: Literal["off", "sample", "full"] = "sample"
    """How much is read again after the load to be compared: of host memory, and for GPU memory, which the GPU has
    digested whole, of the source."""


class MetricsConfig(_Section, frozen=True):
    """Prometheus metrics and the status page."""

    listen: str | None = None
    """`host:port` (an IPv6 address in brackets; `:port` is loopback), such as `127.0.0.1:9400`; null = off."""


class Config(_Section, frozen=True):
    """The whole of engram.json."""

    model_path: Text | None = None
    """Folder of the checkpoint. Required, unless load_format is `dummy` and geometry is given."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`auto`: the checkpoint's tables. `dummy`: tables of the same shape filled from the seed."""
    geometry: dict[str, Any] | None = None
    """`engram_*` keys as in a text_config, for load_format `dummy` without a model_path."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Seed of the dummy tables."""
    engram_config: EngramConfig | None = None
    """The object of SGLang's `--engram-config`."""
    tp_size: Positive | None = None
    """Ranks of the TP group over all nodes, a multiple of nnodes; null = the number of devices, 1 without GPUs."""
    nnodes: Positive = 1
    """Nodes that the TP group spans."""
    node_rank: Natural = 0
    """This node's place among them; node k holds ranks k * tp_size / nnodes and following."""
    devices: tuple[Natural | Text, ...] | None = None
    """This node's GPUs in rank order, as indices (PCI order) or UUIDs; null = all. A GPU that is named
    again has the shards of several ranks."""
    host: HostConfig = HostConfig()
    """Host memory."""
    control: ControlConfig = ControlConfig()
    """Sockets, and who may use them."""
    load: LoadConfig = LoadConfig()
    """How the checkpoint is read."""
    metrics: MetricsConfig = MetricsConfig()
    """Prometheus metrics and the status page."""

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
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        raise ConfigUnreadable(path=str(path), problem=getattr(error, "strerror", None) or str(error)) from error
    raw = parse_json(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigInvalid(where=str(path), path="$", problem=f"is {shown(raw)}", allowed=describe(Config))
    remarks: list[str] = []
    if engram_config is not None:
        raw = {**raw, "engram_config": parse_json(engram_config, "--engram-config")}
        convert(raw["engram_config"], EngramConfig, "--engram-config")
    if raw.get("engram_config") is None:
        deprecated = from_deprecated_variables(environ)
        remarks.extend(deprecated.warnings)
        if deprecated.engram_config:
            raw = {**raw, "engram_config": deprecated.engram_config}
    config = convert(raw, Config, str(path))
    return LoadedConfig(config, (*remarks, *check(config, str(path))))


def check(config: Config, where: str) -> tuple[str, ...]:
    """Refuses combinations that contradict each other; returns remarks on values that have no effect.

    Raises ConfigInvalid, ConfigContradiction or SocketPathInvalid.
    """
    _check_tables(config, where)
    _check_ranks(config, where)
    _check_host(config.host, where)
    _check_listen(config.metrics.listen, where)
    return (*_check_engram(config), *_check_control(config.control, where))


def _check_engram(config: Config) -> Iterator[str]:
    engram = config.engram
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
        yield 'lookup "collective" has no effect with replication "per_node": every rank maps all rows'
    if engram.lookup is Lookup.PEER_READ and config.tp_size == 1:
        yield 'lookup "peer_read" has no effect at tp_size 1: the one rank owns all rows'


def _check_tables(config: Config, where: str) -> None:
    if config.model_path is None and config.load_format == "auto":
        _refuse(where, "model_path", "is missing", 'a checkpoint\'s folder (only load_format "dummy" goes without)')
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


def _check_ranks(config: Config, where: str) -> None:
    if config.node_rank >= config.nnodes:
        _refuse(where, "node_rank", f"is {config.node_rank}", f"0 to nnodes - 1 = {config.nnodes - 1}")
    if config.tp_size is not None and config.tp_size % config.nnodes:
        raise ConfigContradiction(
            keys=f"tp_size {config.tp_size} and nnodes {config.nnodes}",
            reason="every node holds the same number of ranks",
            remedy="make tp_size a multiple of nnodes",
        )
    if config.devices is not None and not config.devices:
        _refuse(where, "devices", "is empty", "indices or UUIDs, or null for all")


def _check_host(host: HostConfig, where: str) -> None:
    if (host.backing == "file") != (host.path is not None):
        raise ConfigContradiction(
            keys=f'host.backing "{host.backing}" and host.path {json.dumps(host.path)}',
            reason='backing "file" needs the folder of a tmpfs or hugetlbfs, and only it has one',
            remedy="give both or neither",
        )
    if not re.fullmatch(r"none|interleave|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", host.numa):
        _refuse(where, "host.numa", f"is {shown(host.numa)}", '"none", "interleave" or a node list such as "0-1"')


def _check_listen(listen: str | None, where: str) -> None:
    address = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]*):([0-9]{1,5})", ":0" if listen is None else listen)
    if address is None or int(address[1]) > 65535:
        _refuse(where, "metrics.listen", f"is {shown(listen)}", 'null or host:port, such as "127.0.0.1:9400"')


def _check_control(control: ControlConfig, where: str) -> Iterator[str]:
    path = ipc_path(control.endpoint)
    if handover_path(control.endpoint, control.handover) == path:
        _refuse(where, "control.handover", "is the control socket's own path", "another path, or null")
    if (control.uids or control.gids) and int(control.mode, 8) & 0o077 == 0:
        yield (
            f"control.uids and control.gids let others in, but control.mode {control.mode} does not: "
            'set it to "0660" or "0666"'
        )


def _refuse(where: str, path: str, problem: str, allowed: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigInvalid(where=where, path=path, problem=problem, allowed=allowed) from cause


# Deprecated variables of SGLang

HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"
PEER_SHARDS = "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS"
_TRUE, _FALSE = ("true", "1", "yes", "y"), ("false", "0", "no", "n")


@dataclass(frozen=True)
class Deprecated:
    """What the old variables ask for (`{}`: nothing), and what to tell their user, one sentence each."""

    engram_config: dict[str, str]
    warnings: tuple[str, ...]


def from_deprecated_variables(environ: Mapping[str, str]) -> Deprecated:
    """What SGLang's old variables ask for.

    As in SGLang: a boolean that cannot be read is warned about and counts as false, PEER_SHARDS wins over
    HOST_TABLE, LAYOUT is looked at only with HOST_TABLE, and a wrong layout ends the start. Unlike
    SGLang 0.5.23, where it meant the shared layout, HOST_TABLE alone means one shard per rank.
    Raises ConfigInvalid for the wrong layout.
    """
    used = [name for name in (HOST_TABLE, LAYOUT, PEER_SHARDS) if name in environ]
    if not used:
        return Deprecated({}, ())
    warnings: list[str] = []
    peer_shards = _boolean(environ, PEER_SHARDS, warnings)
    host_table = _boolean(environ, HOST_TABLE, warnings)
    layout = environ.get(LAYOUT)
    engram: dict[str, str] = {}
    if peer_shards:
        engram = {"lookup": "peer_read"}
        if host_table:
            warnings.append(f"{PEER_SHARDS} takes precedence: {HOST_TABLE} is ignored")
    elif host_table:
        engram = {"placement": "cpu"}
        if layout not in (None, "per_rank", "shared"):
            _refuse("environment", LAYOUT, f"is {json.dumps(layout)}", '"per_rank" or "shared"')
        if layout == "shared":
            engram["replication"] = "per_node"
        elif layout is None:
            warnings.append(f'{HOST_TABLE} without {LAYOUT} gives one shard per rank; "shared" gives one whole table')
    names = f"{', '.join(used)} {'is' if len(used) == 1 else 'are'} deprecated"
    if engram:
        advice = f'{names}; write "engram_config": {json.dumps(engram)} instead'
    else:
        advice = f"{names} and without effect here; remove {'it' if len(used) == 1 else 'them'}"
    return Deprecated(engram, (advice, *warnings))


def _boolean(environ: Mapping[str, str], name: str, warnings: list[str]) -> bool:
    value = environ.get(name, "false").lower()
    if value not in _TRUE + _FALSE:
        warnings.append(
            f"{name} is {json.dumps(environ[name])}, not one of {', '.join(_TRUE + _FALSE)}: it counts as false"
        )
    return value in _TRUE


# Strict JSON


def parse_json(text: str, where: str) -> Any:
    """Strict JSON: no duplicate keys, no NaN, no NUL or half a surrogate pair in a string.

    Raises ConfigNotJson or ConfigInvalid.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                _refuse(where, key, "is given twice", "each key once")
            found[key] = value
        return found

    def constant(name: str) -> Any:
        _refuse(where, "$", f"holds {name}", "numbers as JSON has them")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ConfigNotJson(where=where, problem=error.msg, line=error.lineno, column=error.colno) from error
    except RecursionError as error:
        _refuse(where, "$", "is nested too deeply", "what engram.json documents", error)
    except ValueError as error:  # Python's limit on the digits of a number
        _refuse(where, "$", "holds a number of thousands of digits", "what engram.json documents", error)
    for found in _strings(value):
        if re.search("[\0\ud800-\udfff]", found):
            _refuse(where, "$", f"holds the string {shown(found)}", "text without NUL and half surrogate pairs")
    return value


def _strings(value: Any) -> Iterator[str]:
    """Every string and key in a JSON value."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str):
            yield item
