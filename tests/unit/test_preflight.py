"""What is said of a machine before anything is allocated: recorded machines, and the plan's own judgement."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import NoEngramLayers, NotEnoughMemory
from engram_server import preflight
from engram_server.config import Config
from engram_server.findings import Finding, Level
from engram_server.gpus import Gpus
from engram_server.machine import HugePool, NumaNode
from engram_server.plan import HugePages, Plan, make_plan
from engram_server.process import UNLIMITED, Process
from tests.support.loads import config
from tests.support.machines import GIB, machine, record

GEOMETRY = {
    "engram_layer_ids": [1],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 1000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
}


def settings(**sections: Any) -> Config:
    """Generated tables of some 6 MiB."""
    raw = {"load_format": "dummy", "geometry": GEOMETRY, "engram_config": {"placement": "cpu"}}
    return msgspec.convert(raw | sections, Config)


def plan_for(chosen: Config, **changes: Any) -> Plan:
    source = preflight.read_source(chosen)
    return make_plan(chosen, source.model, machine(**changes), Gpus.none("none"))


def by_id(findings: Any) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}


@given(
    st.sampled_from(["always", "within_size", "advise", "never", "deny", "force", None]),
    st.sampled_from(["madvise", None]),
    st.sampled_from([(5, 10), (5, 14), (6, 0), (6, 1), (6, 18)]),
    st.sampled_from(["auto", "off"]),
    st.sampled_from([0, 1 << 20]),
)
def test_huge_pages_are_warned_about_exactly_where_the_plan_does_without(
    shmem: str | None, enabled: str | None, kernel: tuple[int, int], asked: str, pool: int
) -> None:
    chosen = settings(host={"huge_pages": asked})
    facts = {
        "thp_shmem": shmem,
        "thp_enabled": enabled,
        "kernel": kernel,
        "huge_pool": HugePool(total=pool, free=pool, reserved=0),
    }
    plan = plan_for(chosen, **facts)
    found = by_id(preflight.machine_findings(machine(**facts), chosen, plan))["thp"]
    missed = plan.huge_pages is HugePages.BASE and asked != "off"
    assert (found.level is Level.WARN) == missed
    assert bool(found.remedy) == missed


def test_an_old_kernel_with_shmem_enabled_never_is_told_the_knob() -> None:
    facts = {"thp_shmem": "never", "kernel": (5, 15)}
    chosen = settings()
    found = by_id(preflight.machine_findings(machine(**facts), chosen, plan_for(chosen, **facts)))["thp"]
    assert found.level is Level.WARN
    assert "shmem_enabled" in found.remedy


@pytest.mark.parametrize(("check", "level"), [("strict", Level.FAIL), ("warn", Level.WARN), ("off", Level.OK)])
def test_short_memory_is_judged_as_memory_check_says(check: str, level: Level) -> None:
    chosen = settings(host={"memory_check": check})
    plan = plan_for(chosen)
    small = machine(mem_available=1 << 20)
    found = by_id(preflight.machine_findings(small, chosen, plan))["memory"]
    assert found.level is level
    assert (found.error == NotEnoughMemory.__name__) == (level is not Level.OK)


def test_several_nodes_without_a_policy_are_a_warning_with_a_remedy() -> None:
    nodes = tuple(NumaNode(id=index, total=GIB, available=GIB) for index in (0, 1))
    found = by_id(preflight.machine_findings(machine(nodes=nodes), settings(), None))["numa"]
    assert (found.level, "host.numa" in found.remedy) == (Level.WARN, True)
    bound = settings(host={"numa": "interleave"})
    assert by_id(preflight.machine_findings(machine(nodes=nodes), bound, None))["numa"].level is Level.OK


def test_the_oldest_kernels_are_told_what_they_lack() -> None:
    assert by_id(preflight.machine_findings(machine(kernel=(5, 10)), None, None))["kernel"].level is Level.WARN


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         8388608              unlimited            bytes
Max open files            1024                 {files}                files
"""


def recorded(root: Path, files: str = "1048576", seccomp: str = "2", namespace: str = "pid:[4026532001]") -> Process:
    record(root, {"proc/self/limits": LIMITS.format(files=files), "proc/self/status": f"Seccomp:\t{seccomp}\n"})
    (root / "proc/self/ns").mkdir(exist_ok=True)
    os.symlink(namespace, root / "proc/self/ns/pid")
    return Process.read(root)


def test_a_containers_process_is_read_from_its_recording(tmp_path: Path) -> None:
    assert recorded(tmp_path) == Process(
        open_files=1048576, memlock=8388608, seccomp=True, own_pid_namespace=True, memfd_problem="", mbind_problem=""
    )


def test_a_hosts_process_without_a_filter(tmp_path: Path) -> None:
    found = recorded(tmp_path, files="unlimited", seccomp="0", namespace="pid:[4026531836]")
    assert (found.open_files, found.seccomp, found.own_pid_namespace) == (UNLIMITED, False, False)


def test_an_empty_recording_is_a_process_of_unknowns(tmp_path: Path) -> None:
    found = Process.read(tmp_path)
    assert (found.open_files, found.memlock, found.seccomp, found.own_pid_namespace) == (None, None, None, None)
    assert all(finding.level is Level.OK for finding in preflight.process_findings(found, None))


def test_few_descriptors_are_a_warning(tmp_path: Path) -> None:
    found = by_id(preflight.process_findings(recorded(tmp_path, files="1024"), None))
    assert found["open_files"].level is Level.WARN
    assert found["pid_namespace"].level is Level.OK, "a namespace of its own works"


def test_a_sandbox_without_memfd_fails_and_one_without_mbind_only_where_it_is_needed() -> None:
    facts = {"open_files": UNLIMITED, "memlock": UNLIMITED, "seccomp": True, "own_pid_namespace": True}
    refused = Process(**facts, memfd_problem="memfd_create: Operation not permitted")
    assert by_id(preflight.process_findings(refused, None))["system_calls"].level is Level.FAIL
    unbound = Process(**facts, mbind_problem="get_mempolicy: Operation not permitted")
    plain, spread = plan_for(settings()), plan_for(settings(host={"numa": "interleave"}))
    assert by_id(preflight.process_findings(unbound, plain))["system_calls"].level is Level.OK
    found = by_id(preflight.process_findings(unbound, spread))["system_calls"]
    assert (found.level, "CAP_SYS_NICE" in found.remedy) == (Level.FAIL, True)


def test_this_process_may_make_sealed_memfds() -> None:
    found = Process.read()
    assert found.memfd_problem == ""
    assert found.open_files


def test_preparing_raises_what_the_daemon_ends_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    with pytest.raises(NoEngramLayers):
        preflight.prepare(config(tmp_path))


def test_preparing_a_generated_table_gives_its_plan() -> None:
    prepared = preflight.prepare(settings(host={"memory_check": "off"}))
    assert prepared.source.tables is None
    assert prepared.plan.needed_bytes >= sum(table.nbytes for table in prepared.plan.tables)
    assert all(finding.level is not Level.OK for finding in prepared.findings)


def test_the_daemon_says_before_it_allocates_what_the_doctor_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing twice: short memory, small pages and nodes without a policy are in the plan's own words."""
    nodes = tuple(NumaNode(id=index, total=GIB, available=GIB) for index in (0, 1))
    old = machine(kernel=(5, 10), nodes=nodes, thp_enabled=None)
    monkeypatch.setattr(preflight.Machine, "read", lambda root="/", folder=None: old)
    prepared = preflight.prepare(settings(host={"memory_check": "off", "backing": "memfd"}))
    said = {finding.id for finding in prepared.findings}
    warned = {f.id for f in preflight.machine_findings(old, settings(), prepared.plan) if f.level is Level.WARN}
    assert {"kernel", "thp", "numa"} <= warned
    assert said & warned == warned - preflight.PLAN_SAYS
    assert len(prepared.plan.remarks) >= 2
