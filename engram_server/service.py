"""The daemon's life: own the endpoint, plan, load, serve, drain.

    STARTING -> LOADING -> READY -> DRAINING
         any of these -> FAILED, whose error is the exit code

Sockets come first, so that clients can wait for the load and hear why it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from engram_client.errors import EXIT_OK, EngramError, InternalError, LoadFailed, ServerDraining
from engram_client.identity import TableIdentity
from engram_client.protocol import (
    Attach,
    Failed,
    LoadProgress,
    LoadReport,
    Progress,
    Reply,
    Report,
    Request,
    SegmentStatus,
    SetLogLevel,
    State,
    StatusReply,
    TableInfo,
    endpoint_tag,
)
from engram_client.version import VERSION
from engram_server import attach, logs, preflight, state
from engram_server.bring_up import allocate_and_load
from engram_server.config import LoadedConfig
from engram_server.control import Asker, Control
from engram_server.handover import Handover
from engram_server.leases import Leases
from engram_server.load_job import LoadResult, make_job
from engram_server.plan import Plan
from engram_server.progress import ProgressDisplay
from engram_server.segments import Segment, remove_stale
from engram_server.sockets import EndpointLock, listen_for_handover
from engram_server.tally import Tally

if TYPE_CHECKING:
    from engram_server.httpd import StatusServer
    from engram_server.metrics import Snapshot

log = logging.getLogger(__name__)

DRAIN_LIMIT_S = 5.0
"""How long a draining daemon waits for tickets it has given out to be redeemed."""
MAX_WAITING = 4096


class Service:
    """One daemon. `run` returns when it has drained and raises the error that ended it otherwise."""

    def __init__(self, loaded: LoadedConfig, lock: EndpointLock) -> None:
        self._config = loaded.config
        self._lock = lock
        self._state = State.STARTING
        self._epoch = secrets.token_hex(8)
        self._started = time.monotonic()
        self._tag = endpoint_tag(self._config.control.endpoint)
        self._leases = Leases(time.monotonic)
        self._tally = Tally()
        self._http: StatusServer | None = None
        self._waiting: dict[Asker, Attach] = {}
        self._plan: Plan | None = None
        self._segments: dict[str, Segment] = {}
        self._result: LoadResult | None = None
        self._tables: tuple[TableInfo, ...] = ()
        self._progress: LoadProgress | None = None
        self._failure: EngramError | None = None
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._control: Control | None = None
        self._handover: Handover | None = None

    def __repr__(self) -> str:
        return f"<Service {self._config.control.endpoint}: {self._state}, {self._leases}>"

    def stop(self) -> None:
        """Asks the daemon to drain; a second call does not wait for clients. For signal handlers."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def run(self) -> int:
        """Serves until `stop`. Returns EXIT_OK; raises the EngramError that ended the daemon."""
        try:
            self._handover = Handover(
                listen_for_handover(self._lock.handover_path, self._config.control),
                self._config.control,
                self._epoch,
                self._leases,
                lambda name: self._segments[name].readable_fd,
            )
            self._control = Control(self._lock.control_path, self._config.control, self._handle)
            self._http = self._listen_for_http()
            if await self._until_stopped(self._bring_up()):
                await self._serve()
            await self._drain()
            return EXIT_OK
        except Exception as error:
            await self._fail(error)
            raise
        finally:
            await self._tear_down()

    # Bringing the tables up

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> bool:
        """Runs `work`; False when `stop` came first, in which case it has been cancelled and awaited."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():  # what is not done, or has failed meanwhile, does not matter any more
                return False
            task.result()
            return True
        finally:
            for pending in (task, stopping):
                pending.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def _bring_up(self) -> None:
        for path in remove_stale(self._tag, self._config.host.path):
            log.info("removed %s, which a daemon that died had left", path)
        prepared = await asyncio.to_thread(preflight.prepare, self._config)
        self._plan = prepared.plan
        for remark in self._plan.remarks:
            log.warning("%s", remark)
        for finding in prepared.findings:
            log.warning("%s: %s; %s", finding.id, finding.seen, finding.remedy)
        log.info("%s", self._plan.log_line)
        self._enter(State.LOADING)
        job = make_job(self._plan, self._config, prepared.source.tables, prepared.machine.cpus)
        with ProgressDisplay() as display:

            def report(progress: LoadProgress) -> None:
                self._progress = progress
                display.show(progress)
                self._tell_waiting(Progress(state=self._state, load=progress))

            self._result = await allocate_and_load(self._plan, self._tag, job, self._segments, report)
        segments = list(self._segments.values())
        for segment in segments:
            segment.seal()
        self._tables = self._table_infos(segments, self._result)
        self._log_loaded(self._result)
        if self._config.load.verify != "off":
            self._tally.count_verified(ok=True)  # a load that finds a difference ends the daemon
        self._enter(State.READY)
        for asker, request in self._take_waiting():
            await self._reply(asker, self._answer_attach(request))

    def _table_infos(self, segments: Sequence[Segment], result: LoadResult) -> tuple[TableInfo, ...]:
        plan = self._planned
        return tuple(
            TableInfo(
                geometry=geometry,
                identity=TableIdentity.of(geometry, result.roots.get(geometry.layer_id)),
                segments=tuple(s.info for s in segments if s.info.layer_id == geometry.layer_id),
            )
            for geometry in plan.tables
        )

    def _log_loaded(self, result: LoadResult) -> None:
        report = result.report
        for remark in result.remarks:
            log.warning("%s", remark)
        for table in self._tables:
            log.info("layer %d: %d rows, root %s", table.geometry.layer_id, table.geometry.rows, table.identity.root)
        log.info(
            "loaded %d bytes in %.2f s (allocate %.2f s, fill %.2f s, %.2f GB/s, verify %.2f s) with %d threads",
            report.bytes_read,
            report.seconds,
            report.allocate_seconds,
            report.fill_seconds,
            report.bytes_per_second / 1e9,
            report.verify_seconds,
            report.threads,
        )

    @property
    def _planned(self) -> Plan:
        if self._plan is None:
            raise InternalError(doing="serving", problem="there is no plan yet")
        return self._plan

    # Serving

    async def _serve(self) -> None:
        log.info("ready: %s serves %d tables", self._config.control.endpoint, len(self._tables))
        control = self._control.task if self._control else None
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            done, _ = await asyncio.wait(
                {stopping} | ({control} if control else set()), return_when=asyncio.FIRST_COMPLETED
            )
            if control in done:
                raise InternalError(doing="serving the control socket", problem=repr(control))
        finally:
            stopping.cancel()

    def _listen_for_http(self) -> StatusServer | None:
        if self._config.metrics.listen is None:
            return None
        from engram_server.httpd import StatusServer  # 150 ms of imports, only where they are wanted

        return StatusServer(self._config.metrics.listen, asyncio.get_running_loop(), self._snapshot)

    def _snapshot(self) -> Snapshot:
        from engram_server.metrics import Snapshot

        return Snapshot.of(self._status(), self._leases.lookups, self._leases.granted, self._tally)

    def _handle(self, asker: Asker, request: Request) -> Reply | None:
        if isinstance(request, Report):
            self._take_report(request)
            return None
        if isinstance(request, SetLogLevel):
            return logs.set_level(request.level)
        if isinstance(request, Attach):
            if self._state is State.DRAINING:
                raise ServerDraining()
            if self._state is State.FAILED:
                raise self._load_failed()
            if self._state in state.WAITS[Attach] and request.wait:
                return self._wait(asker, request)
            return self._answer_attach(request)
        return self._status()

    def _take_report(self, report: Report) -> None:
        if report.epoch == self._epoch and self._leases.report(report):
            self._tally.attach_s.observe(report.attach_s)

    def _wait(self, asker: Asker, request: Attach) -> Reply:
        attach.check_wait(len(self._waiting), MAX_WAITING)
        self._waiting[asker] = request
        return Progress(state=self._state, load=self._progress)

    def _answer_attach(self, request: Attach) -> Reply:
        try:
            return attach.answer(
                request,
                self._state,
                self._epoch,
                self._plan.options if self._plan else None,
                self._tables,
                self._leases,
            )
        except EngramError as error:
            self._tally.refused[error.code] += 1
            return Failed.of(error)

    def _status(self) -> StatusReply:
        plan, result = self._plan, self._result
        huge = result.huge_bytes if result else {}
        return StatusReply(
            state=self._state,
            version=VERSION,
            epoch=self._epoch,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            options=plan.options if plan else None,
            backing_reason=plan.backing_reason if plan else "",
            load=self._progress,
            report=self._report,
            tables=self._tables,
            segments=tuple(
                SegmentStatus(info=s.info, huge_bytes=huge.get(s.info.id, 0), numa=self._config.host.numa)
                for s in self._segments.values()
            ),
            leases=self._leases.snapshot(),
            lease_count=self._leases.held,
            failure=str(self._failure) if self._failure else None,
        )

    @property
    def _report(self) -> LoadReport | None:
        return self._result.report if self._result else None

    def _enter(self, reached: State) -> None:
        self._state = state.follow(self._state, reached)
        log.debug("state: %s", self._state)

    # Telling those who wait

    def _take_waiting(self) -> list[tuple[Asker, Attach]]:
        waiting = list(self._waiting.items())
        self._waiting.clear()
        return waiting

    def _tell_waiting(self, progress: Progress) -> None:
        asyncio.ensure_future(self._tell(progress))  # noqa: RUF006  sending never blocks: it is done at once

    async def _tell(self, progress: Progress) -> None:
        for asker in list(self._waiting):
            if not await self._reply(
                asker, progress
            ):  # gone: it must not take a place, and a ticket when all is loaded
                self._waiting.pop(asker, None)

    async def _reply(self, asker: Asker, reply: Reply) -> bool:
        """False when the asker is gone."""
        return self._control is not None and await self._control.send(asker, reply)

    # Ending

    async def _drain(self) -> None:
        self._enter(State.DRAINING)
        log.info("draining: %s", self._leases)
        for asker, _ in self._take_waiting():
            await self._reply(asker, Failed.of(ServerDraining()))
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while self._leases.open_tickets and time.monotonic() < deadline and not self._stop_now.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), 0.05)

    async def _fail(self, error: Exception) -> None:
        self._failure = (
            error if isinstance(error, EngramError) else InternalError(doing="serving", problem=repr(error)[:500])
        )
        self._state = State.FAILED
        for asker, _ in self._take_waiting():
            await self._reply(asker, Failed.of(self._load_failed()))

    def _load_failed(self) -> LoadFailed:
        failure = self._failure
        return LoadFailed(cause_code=failure.code if failure else "", cause=str(failure))

    async def _tear_down(self) -> None:
        if self._http is not None:
            await asyncio.to_thread(self._http.close)
        if self._control is not None:
            await self._control.close()
        if self._handover is not None:
            self._handover.close()
        for segment in self._segments.values():
            segment.discard()
        self._lock.release()
