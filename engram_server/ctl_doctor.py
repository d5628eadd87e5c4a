"""`engram-ctl doctor`: will it work here, how much memory where, how long, and what would make it faster."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

import msgspec

from engram_server.findings import Level, gib, worst

if TYPE_CHECKING:
    from engram_server.doctor import Diagnosis

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
_VERDICTS = {
    Level.OK: "It will work.",
    Level.WARN: "It will work, with warnings.",
    Level.FAIL: "It will not work.",
}


def add_parser(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="will it work on this machine, how much memory where, how long will it take",
        description="Exit code 0: it works; 1: it works, with warnings; 2: it will not work. Changes nothing.",
    )
    doctor.add_argument("--config", metavar="FILE", help="engram.json to judge the machine for")
    doctor.add_argument("--engram-config", metavar="JSON", help="as engram-server takes it")
    doctor.add_argument("--root", default="/", metavar="DIR", help="a machine recorded there instead of this one")
    doctor.add_argument("--json", action="store_true", help="findings, plan and forecast as JSON")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from engram_server.doctor import diagnose  # brings numpy, for it does a piece of the loader's work

    diagnosis = diagnose(options.config, options.engram_config, os.environ, options.root)
    if options.json:
        verdict = {"level": worst(diagnosis.findings), **msgspec.to_builtins(diagnosis)}
        print(json.dumps(verdict, indent=2))
    else:
        show(diagnosis)
    return diagnosis.exit_code


def show(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table("check", "level", "seen", "remedy")
    for finding in diagnosis.findings:
        level = f"[{_COLOURS[finding.level]}]{finding.level}[/]"
        table.add_row(finding.id, level, escape(finding.seen), escape(finding.remedy))
    console.print(table)
    if diagnosis.plan is not None:
        plan = diagnosis.plan
        memory = Table("segment", "bytes", "backing", "pages", "NUMA", title="memory")
        for name, nbytes in plan["segments"].items():
            memory.add_row(name, gib(nbytes), plan["backing"], plan["huge_pages"], plan["numa"])
        console.print(memory)
        console.print(f"{gib(plan['needed_bytes'])} needed, {gib(plan['available_bytes'])} available")
    level = worst(diagnosis.findings)
    console.print(f"[bold {_COLOURS[level]}]{_VERDICTS[level]}[/]")
