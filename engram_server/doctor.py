"""Will it work on this machine, how much memory will it take where, and how long? Answers as data.

Runs every check even when one fails, and measures about a second. Changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engram_client.control import query_status
from engram_client.errors import EngramError, ServerRefused
from engram_client.protocol import handover_path, ipc_path
from engram_server import gpus, preflight, surroundings
from engram_server.config import Config, load_config
from engram_server.findings import Finding, Level, exit_code, gib, of_error
from engram_server.forecast import Forecast, measure
from engram_server.gpus import Gpus
from engram_server.load_job import make_job
from engram_server.machine import Machine, available_host_bytes, file_system_name
from engram_server.nvml import Inventory, inventory
from engram_server.plan import Plan, make_plan
from engram_server.preflight import Source
from engram_server.process import Process

SLOW_BYTES_PER_S = 500e6
"""Below this a load of the released tables takes longer than seven minutes."""
ALONE = "/"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What `engram-ctl doctor --json` prints."""

    findings: tuple[Finding, ...]
    plan: dict[str, Any] | None
    """Where memory goes, in bytes; None without a configuration or where none can be made."""
    forecast: Forecast | None

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)


def diagnose(
    config_path: str | None, engram_config: str | None, environ: Mapping[str, str], root: str = ALONE
) -> Diagnosis:
    """Looks at this machine, or at the one recorded under `root`, where only what is recorded is judged."""
    here = root == ALONE
    findings: list[Finding] = []
    config = None
    if config_path is not None:
        try:
            loaded = load_config(config_path, engram_config, environ)
            config = loaded.config
            findings.append(Finding(id="config", level=Level.OK, seen=f"{config_path} is sound"))
            findings += [_remark(remark) for remark in loaded.remarks]
        except EngramError as error:
            findings.append(of_error("config", error))
    machine = Machine.read(root, folder=config.host.path if config else None)
    process = Process.read(root)
    source = _source(config, findings)
    found = _gpus(config, here, findings)
    plan = _plan(config, source, machine, found, findings)
    findings += _gpu_findings(inventory() if here else Inventory(problem="not recorded"), found, plan)
    findings += surroundings.place_findings(found, plan)
    findings += surroundings.memory_link_findings(found, config)
    findings += surroundings.imex_findings(found, root)
    findings += preflight.machine_findings(machine, config, plan)
    findings += surroundings.shm_findings(machine, plan, root)
    findings += preflight.process_findings(process, plan)
    forecast = None
    if config is not None and here:
        findings += _socket_findings(config)
        if source is not None and plan is not None:
            forecast = _forecast(config, source, plan, machine, found, findings)
    return Diagnosis(findings=_once(findings), plan=_plan_facts(plan, machine), forecast=forecast)


def _once(findings: list[Finding]) -> tuple[Finding, ...]:
    """One refusal may be found twice, by the plan and by the machine's own check: the first one stays."""
    refused = {finding.id for finding in findings if finding.level is Level.FAIL}
    kept: list[Finding] = []
    for finding in findings:
        if finding.id in refused and any(other.id == finding.id for other in kept):
            continue
        kept.append(finding)
    return tuple(kept)


def _remark(remark: str) -> Finding:
    return Finding(id="config_remark", level=Level.WARN, seen=remark, remedy="change engram.json, or let it be")


# Tables and plan


def _source(config: Config | None, findings: list[Finding]) -> Source | None:
    if config is None:
        return None
    try:
        source = preflight.read_source(config)
    except EngramError as error:
        findings.append(preflight.of_refusal(error))
        return None
    tables = ", ".join(f"layer {table.layer_id}: {table.rows:,} rows" for table in source.model.tables())
    where = "generated from the seed" if source.tables is None else _place(str(config.model_path))
    findings.append(Finding(id="checkpoint", level=Level.OK, seen=f"{tables}; {where}"))
    return source


def _place(path: str) -> str:
    return f"on {file_system_name(path)}, every byte promised is there"


def _gpus(config: Config | None, here: bool, findings: list[Finding]) -> Gpus | None:
    """What the daemon would find; None where that is an error of its own."""
    if not here:
        return Gpus.none("not recorded")
    try:
        return gpus.read(config or Config())
    except EngramError as error:
        findings.append(preflight.of_refusal(error))
        return None


def _plan(
    config: Config | None, source: Source | None, machine: Machine, found: Gpus | None, findings: list[Finding]
) -> Plan | None:
    """The plan; one made without looking at memory where only that stands in the way."""
    if config is None or source is None or found is None:
        return None
    for check in (True, False):
        try:
            return make_plan(config, source.model, machine, found, check_resources=check)
        except EngramError as error:
            if check:
                findings.append(preflight.of_refusal(error))
    return None


def _plan_facts(plan: Plan | None, machine: Machine) -> dict[str, Any] | None:
    if plan is None:
        return None
    available, source = available_host_bytes(machine)
    return {
        "needed_bytes": plan.needed_bytes,
        "available_bytes": available,
        "available_by": source,
        "backing": plan.backing,
        "backing_reason": plan.backing_reason,
        "huge_pages": plan.huge_pages,
        "numa": str(plan.numa),
        "options": msgspec.to_builtins(plan.options),
        "segments": {segment.id: segment.nbytes for segment in plan.segments},
        "remarks": list(plan.remarks),
    }


# What is around


def _gpu_findings(shown: Inventory, found: Gpus | None, plan: Plan | None) -> Iterator[Finding]:
    """What NVML shows, and what the driver was tried on."""
    if not shown.gpus and (found is None or not found.devices):
        yield Finding(id="gpu", level=Level.OK, seen=f"no GPU ({shown.problem}): tables can be in host memory only")
        return
    names = ", ".join(f"{gpu.index}: {gpu.name}, {gib(gpu.free)} of {gib(gpu.total)} free" for gpu in shown.gpus)
    yield Finding(id="gpu", level=Level.OK, seen=f"{len(shown.gpus)} GPUs, driver {shown.driver}; {names}")
    if found is None or not found.devices:
        return
    for id, what, problem in (
        ("cuda_host", "host memory of the CUDA driver", found.host_problem),
        ("fabric", "FABRIC handles", found.fabric_problem),
    ):
        seen = f"{what}: " + (f"no ({problem})" if problem else "yes, tried")
        if id == "fabric" and problem and plan is not None and plan.options.reads_across_nodes:
            remedy = 'set "lookup": "collective" on all nodes, or give them an IMEX domain: no rank could attach'
            yield Finding(id=id, level=Level.FAIL, seen=seen, remedy=remedy)
        else:
            yield Finding(id=id, level=Level.OK, seen=seen)
    alone = [gpu.uuid for gpu in found.devices if len(gpu.peers) < len(found.devices) - 1]
    seen = f"without access to some peer: {', '.join(alone)}" if alone else "every GPU can read every other"
    yield Finding(id="peer_access", level=Level.OK, seen=seen)


def _socket_findings(config: Config) -> Iterator[Finding]:
    path = ipc_path(config.control.endpoint)
    for socket_path in (path, handover_path(config.control.endpoint, config.control.handover)):
        folder = os.path.dirname(socket_path)
        remedy = "make the folder for the daemon's user (RuntimeDirectory= in a unit), or move control.endpoint"
        problem = _folder_problem(folder)
        if not problem and (problem := _lock_problem(f"{socket_path}.lock")):
            remedy = "remove it where its daemon has ended, or give it to the daemon's user"
        if problem:
            yield Finding(id="sockets", level=Level.FAIL, seen=f"{folder}: {problem}", remedy=remedy)
            return
    running = _running(config)
    if running:
        remedy = "nothing, unless you meant to start another: give that one its own endpoint"
        yield Finding(id="sockets", level=Level.WARN, seen=running, remedy=remedy)
        return
    yield Finding(id="sockets", level=Level.OK, seen=f"sockets can be made in {os.path.dirname(path)}")


def _folder_problem(folder: str) -> str:
    """Why no socket can be made there. The daemon makes the folder and those above it itself."""
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not stat.S_ISDIR(place.stat().st_mode):
            return f"{place} is not a folder"
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(place, os.W_OK | os.X_OK) else f"uid {os.geteuid()} may not write in {place}"


def _lock_problem(path: str) -> str:
    """Why the lock file of a daemon before cannot be taken: it stays when a daemon ends, and may be another user's."""
    if not os.path.lexists(path) or os.access(path, os.R_OK | os.W_OK):
        return ""
    return f"uid {os.geteuid()} may not open {os.path.basename(path)}, which a daemon of another user left"


def _running(config: Config) -> str:
    """What the daemon at this endpoint says, if there is one."""
    control = config.control
    with contextlib.suppress(ServerRefused):  # a socket that a dead daemon left
        try:
            reply = query_status(control.endpoint, timeout=0, handover=control.handover)
            return f"a daemon (pid {reply.pid}, {reply.state}) already serves {control.endpoint}"
        except EngramError as error:
            return "" if error.code == "NoServer" else f"{control.endpoint}: {error}"
    return ""


def _forecast(
    config: Config, source: Source, plan: Plan, machine: Machine, found: Gpus | None, findings: list[Finding]
) -> Forecast | None:
    job = make_job(plan, config, source.tables, machine.cpus)
    try:
        forecast = measure(job, plan, available_host_bytes(machine)[0], found.count if found else 0)
    except EngramError as error:
        findings.append(of_error("read_rate", error))
        return None
    findings += _rate_findings(forecast)
    return forecast


def _rate_findings(forecast: Forecast) -> Iterator[Finding]:
    rate = forecast.fill_bytes_per_second
    how = "direct reads" if forecast.direct_io else "reads through the page cache"
    if forecast.read_bytes_per_second is not None:
        one = f"one thread reads {forecast.read_bytes_per_second / 1e9:.2f} GB/s ({how})"
        seen = f"{one}; {forecast.threads} threads load {rate / 1e9:.2f} GB/s"
        level = Level.WARN if rate < SLOW_BYTES_PER_S else Level.OK
        remedy = "copy the two table files to a local disk, or raise load.threads" if level is Level.WARN else ""
        yield Finding(id="read_rate", level=level, seen=seen, remedy=remedy)
        where = "is" if forecast.cached else "is not"
        yield Finding(id="page_cache", level=Level.OK, seen=f"the checkpoint {where} in the page cache")
    yield Finding(
        id="load_time",
        level=Level.OK,
        seen=f"a load of {gib(forecast.bytes)} will take about {forecast.load_seconds:.1f} s, "
        f"an attach about {forecast.attach_seconds:.2f} s",
    )
