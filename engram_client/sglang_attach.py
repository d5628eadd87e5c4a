"""How an SGLang rank attaches: settings, one client a process, progress, and which configuration wins.

Only `engram_client.sglang_layer` uses this, inside SGLang's processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engram_client import client as clients
from engram_client.api import Client
from engram_client.control import query_status
from engram_client.errors import EngineSettingInvalid, EngramError
from engram_client.protocol import Placement, Progress, Replication, ResolvedOptions, State

logger = logging.getLogger(__name__)

LINE = "DeepSeek-V4.1 Engram tables:"
TIMEOUT_S = 60.0
"""How long a rank waits for a daemon to appear; an engine and its daemon are often started together."""
LOAD_LIMIT_S = 3600.0
"""How long it waits for one that is loading, and says how far it is: 189 GiB from a slow disk take their time."""
PROGRESS_EVERY_S = 5.0

SPLIT_READS = "ENGRAM_SPLIT_READS"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")

HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"
PEER_SHARDS = "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS"
STAGING = "SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING"


@dataclass(frozen=True)
class Settings:
    """What the user said about the daemon, from the environment."""

    endpoint: str
    handover: str | None
    timeout_s: float
    split_reads: bool = False
    """Whether the ranks share out the reads of whole tables in host memory."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Raises EngineSettingInvalid."""
        spelled = environment.get("ENGRAM_TIMEOUT", str(TIMEOUT_S))
        try:
            timeout = float(spelled)
        except ValueError:
            timeout = -1.0
        if not 0 <= timeout <= LOAD_LIMIT_S:
            raise EngineSettingInvalid(
                variable="ENGRAM_TIMEOUT", value=spelled, allowed=f"seconds from 0 to {LOAD_LIMIT_S:g}"
            )
        split = environment.get(SPLIT_READS, "0").strip().lower()
        if split not in (*_YES, *_NO):
            raise EngineSettingInvalid(variable=SPLIT_READS, value=split, allowed=", ".join((*_YES, *_NO[:-1])))
        handover = environment.get("ENGRAM_HANDOVER") or None
        return cls(environment.get("ENGRAM_ENDPOINT", ""), handover, timeout, split in _YES)


@dataclass(frozen=True)
class Place:
    """Where this process stands: its place in the tensor-parallel group, and what its lookups run on."""

    rank: int
    world_size: int
    device: str


_clients: dict[tuple[Settings, Place], Client] = {}
_failures: dict[tuple[Settings, Place], EngramError] = {}


def client_of_process(settings: Settings, place: Place, group: Any, *, remember_failure: bool) -> Client:
    """The client that all layers of this process share, attached at the first call.

    A client whose daemon has gone serves the layers that have it; a model that is built later gets a new one, but
    where ranks read across nodes or split reads.
    remember_failure: the next layer fails at once, instead of waiting for the same absent daemon again.
    Raises what `engram_client.connect` raises.
    """
    key = settings, place
    known = _clients.get(key)
    # Ranks that read across nodes, or for each other, attach together: none of them may decide that by itself.
    together = settings.split_reads and place.world_size > 1
    if known is not None and (known.server_alive or known.options.reads_across_nodes or together):
        return known
    if key in _failures:
        raise _failures[key]
    try:
        client = _attach(settings, place, group)
    except EngramError as error:
        if remember_failure:
            _failures[key] = error
        raise
    _clients[key] = client
    if place.rank == 0:
        announce(settings.endpoint, client.options, place.world_size)
    return client


def _attach(settings: Settings, place: Place, group: Any) -> Client:
    timeout = settings.timeout_s
    try:
        status = query_status(settings.endpoint, timeout=timeout, handover=settings.handover)
    except EngramError:
        if not settings.split_reads:
            raise
        timeout = 0.0  # the others wait in connect() to hear of it; it fails at once, and tells them
    else:
        if status.state in (State.STARTING, State.LOADING):
            logger.info("%s the daemon at %s is %s; waiting for it", LINE, settings.endpoint, status.state)
            timeout = LOAD_LIMIT_S
    return clients.connect(
        settings.endpoint,
        rank=place.rank,
        world_size=place.world_size,
        device=place.device,
        group=group,
        timeout=timeout,
        split_reads=settings.split_reads,
        handover=settings.handover,
        name=f"sglang rank {place.rank}",
        on_progress=ProgressLog(),
    )


class ProgressLog:
    """Logs how far the daemon's load is, every few seconds."""

    def __init__(self, every_s: float = PROGRESS_EVERY_S) -> None:
        self._every_s = every_s
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        load = progress.load
        if load is None or now < self._next:
            return
        self._next = now + self._every_s
        percent = 100 * load.done_bytes / load.total_bytes if load.total_bytes else 0.0
        logger.info(
            "%s the daemon is %s: %.1f of %.1f GiB (%.0f %%) after %.0f s",
            LINE,
            load.phase,
            load.done_bytes / 2**30,
            load.total_bytes / 2**30,
            percent,
            load.elapsed_s,
        )


def announce(endpoint: str, options: ResolvedOptions, world_size: int) -> None:
    """One line: what the daemon resolved, and which settings of SGLang's own it overrides."""
    served = _spell(options.placement, options.replication, options.lookup)
    asked = sglang_settings(world_size)
    overridden = [f"{source} asks for {wish}" for source, wish in asked.items() if wish != served]
    if overridden:
        logger.warning(
            "%s the daemon at %s wins with %s, because the tables are in its memory and not in SGLang's; ignored: %s. "
            "Change engram.json, or drop the setting",
            LINE,
            endpoint,
            served,
            "; ".join(overridden),
        )
    else:
        logger.info("%s served by the daemon at %s with %s", LINE, endpoint, served)


def sglang_settings(world_size: int) -> dict[str, str]:
    """What SGLang was told about its own tables: where it was told, and what that asks for. Unset ones do not count.

    `--engram-config`, where a release has it, counts before the variables, as it does in SGLang.
    """
    found: dict[str, str] = {}
    config = _engram_config()
    if config is not None:
        found["--engram-config"] = _spell(
            config.get("placement", "gpu"), config.get("replication", "none"), config.get("lookup", "collective")
        )
    else:
        given = [f"{name}={os.environ[name]}" for name in (HOST_TABLE, LAYOUT, PEER_SHARDS) if name in os.environ]
        if given:
            found[" ".join(given)] = _wish_of_variables(world_size)
    if os.environ.get(STAGING) and _variable(STAGING):
        found[f"{STAGING}={os.environ[STAGING]}"] = "staging by the scheduler"
    return found


def _wish_of_variables(world_size: int) -> str:
    """As SGLang's own embedding reads them: peer shards go before the host table and need a second rank."""
    if _variable(PEER_SHARDS) and world_size > 1:
        return _spell("gpu", "none", "peer_read")
    if _variable(HOST_TABLE):
        return _spell("cpu", "per_node" if _variable(LAYOUT) == "shared" else "none", "collective")
    return _spell("gpu", "none", "collective")


def _variable(name: str) -> Any:
    """The value SGLang makes of a variable, its own default included; None where it does not know the name."""
    from sglang.srt.environ import envs

    field = getattr(envs, name, None)
    return None if field is None else field.get()


def _engram_config() -> Mapping[str, Any] | None:
    from sglang.srt import runtime_context

    try:
        config = getattr(runtime_context.get_server_args(), "engram_config", None)
    except (AttributeError, ValueError):
        return None  # nothing is published: a tool or a test, not an engine
    return config if isinstance(config, Mapping) else None


def _spell(placement: str, replication: str, lookup: str) -> str:
    text = f"placement={placement} replication={replication}"
    # Only split tables in GPU memory leave a choice of lookup.
    split = replication == Replication.NONE and placement == Placement.GPU
    return f"{text} lookup={lookup}" if split else text
