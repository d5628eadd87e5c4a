"""The daemon's life: own the endpoint, plan, load, serve, drain.

    STARTING -> LOADING -> READY -> DEGRADED -> DRAINING      (all of them: state.py)
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
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from engram_client.errors import (
    EXIT_OK,
    EngramError,
    InternalError,
    LoadFailed,
    NotAllowedNow,
    NotPermitted,
    ServerDraining,
)
from engram_client.protocol import (
    Attach,
    Done,
    Drain,
    Evict,
    Failed,
    LoadProgress,
    Progress,
    Reply,
    Report,
    Request,
    SegmentStatus,
    SetLogLevel,
    State,
    Status,
    StatusReply,
    Verify,
    endpoint_tag,
)
from engram_client.version import VERSION
from engram_server import attach, logs, state
from engram_server.background import BackgroundCheck
from engram_server.config import LoadedConfig
from engram_server.control import Asker, Control
from engram_server.fdstore import ServiceManager
from engram_server.handover import Handover
from engram_server.holding import Holding
from engram_server.keep import Keeper
from engram_server.leases import Leases
from engram_server.progress import ProgressDisplay
from engram_server.sockets import EndpointLock, listen_for_handover
from engram_server.tally import Tally

if TYPE_CHECKING:
    from engram_server.httpd import StatusServer
    from engram_server.metrics import Snapshot

log = logging.getLogger(__name__)

DRAIN_LIMIT_S = 5.0
"""How long a draining daemon waits for tickets it has given out to be redeemed, by peers that are still there."""
MAX_WAITING = 4096
START_EXTENSION_S = 120.0
"""How much longer a service manager is asked to wait for a daemon that loads, each time it reports progress."""


class Service:
    """One daemon. `run` returns when it has drained and raises the error that ended it otherwise."""

    def __init__(self, loaded: LoadedConfig, lock: EndpointLock, manager: ServiceManager | None = None) -> None:
        self._config = loaded.config
        self._manager = manager or ServiceManager()
        self._lock = lock
        self._state = State.STARTING
        self._epoch = secrets.token_hex(8)
        self._started = time.monotonic()
        self._tag = endpoint_tag(self._config.control.endpoint)
        self._leases = Leases(time.monotonic)
        self._waiting: dict[Asker, Attach] = {}
        self._keeper = Keeper(self._config, self._tag, self._manager)
        self._holding = Holding(self._config, self._tag, self._epoch, self._keeper)
        self._tally = Tally()
        self._http: StatusServer | None = None
        self._check = BackgroundCheck(self._holding, self._on_damage, self._tally.count_verified)
        self._handlers: dict[type[Request], Callable[[Asker, Any], Reply | None]] = {
            Attach: self._on_attach,
            Status: lambda asker, request: self._status(),
            Verify: lambda asker, request: self._on_verify(),
            Evict: lambda asker, request: self._on_evict(request),
            Drain: lambda asker, request: self._on_drain(request),
            Report: lambda asker, request: self._on_report(request),
            SetLogLevel: lambda asker, request: logs.set_level(request.level),
        }
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
        watchdog = asyncio.create_task(self._show_life(), name="watchdog")
        try:
            self._handover = Handover(
                listen_for_handover(self._lock.handover_path, self._config.control),
                self._config.control,
                self._epoch,
                self._leases,
                lambda name: self._holding.segments[name].readable_fd,
                lambda grant: self._holding.exports.granted(grant),
                self._tally.count_refused,
            )
            refused = self._tally.count_refused
            self._control = Control(self._lock.control_path, self._config.control, self._handle, refused)
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
            watchdog.cancel()  # last: freeing memory may take longer than the manager waits for a sign of life

    async def _show_life(self) -> None:
        """Tells the service manager, twice in each of its intervals, that this loop turns."""
        interval = self._manager.watchdog_s
        while interval is not None:
            self._manager.alive()
            await asyncio.sleep(interval / 2)

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
        with ProgressDisplay() as display:

            def report(progress: LoadProgress) -> None:
                self._progress = progress
                display.show(progress)
                self._tell_waiting(Progress(state=self._state, load=progress))
                share = 100 * progress.done_bytes // max(progress.total_bytes, 1)
                self._manager.status(f"{progress.phase}: {share} %", extend_start_s=START_EXTENSION_S)

            await self._holding.obtain(self._enter, report)
        log.info("%s", self._keeper.outlook)
        self._enter(State.READY)
        if not self._holding.adopted and self._config.load.verify != "off":
            self._tally.count_verified(ok=True)  # a load that finds a difference ends the daemon
        if self._holding.adopted and self._config.load.verify != "off":
            self._check.start()
        for asker, request in self._take_waiting():
            await self._reply(asker, self._answer_attach(request))

    # Serving

    async def _serve(self) -> None:
        log.info("ready: %s serves %d tables", self._config.control.endpoint, len(self._holding.tables))
        self._manager.ready(f"serving {len(self._holding.tables)} tables")
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
        """Checks state.RULES, then does what is asked. Raises NotAllowedNow, NotPermitted and the request's own."""
        rule = state.RULES[type(request)]
        if self._state not in rule.answered | rule.waits:
            self._refuse(request)
        if rule.role is state.Role.OWNER and self._leases.permits.take(getattr(request, "permit", b"")) is None:
            problem = "the permit is unknown, used or expired"
            raise NotPermitted(request=str(request.__struct_config__.tag), owner=os.geteuid(), problem=problem)
        return self._handlers[type(request)](asker, request)

    def _refuse(self, request: Request) -> NoReturn:
        if isinstance(request, Attach) and self._state is State.DRAINING:
            raise ServerDraining()
        if isinstance(request, Attach) and self._state is State.FAILED:
            raise self._load_failed()
        raise NotAllowedNow(request=str(request.__struct_config__.tag), state=self._state.value)

    def _on_attach(self, asker: Asker, request: Attach) -> Reply:
        if self._state in state.RULES[Attach].waits and request.wait:
            return self._wait(asker, request)
        return self._answer_attach(request)

    def _on_report(self, report: Report) -> None:
        if report.epoch == self._epoch and self._leases.report(report):
            self._tally.attach_s.observe(report.attach_s)

    def _on_verify(self) -> Reply:
        self._check.start()
        return Done()

    def _on_evict(self, request: Evict) -> Reply:
        if self._handover is not None:
            self._handover.evict(request.lease)
        return Done()

    def _on_drain(self, request: Drain) -> Reply:
        log.info("asked to drain%s", " and to free all memory" if request.free else "")
        if request.free:
            self._keeper.let_go()
        self.stop()
        return Done()

    def _on_damage(self, segments: set[str]) -> None:
        """Ranks that are attached cannot be helped; no other is given damaged memory, nor is the next daemon."""
        self._holding.mark_damaged(segments)
        if State.DEGRADED in state.TRANSITIONS[self._state]:
            self._enter(State.DEGRADED)
        self._manager.status(f"degraded: {', '.join(sorted(segments))} damaged in memory, restart to load again")

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
                self._holding.plan.options if self._holding.plan else None,
                self._holding.tables,
                self._leases,
                self._holding.damaged,
            )
        except EngramError as error:
            return self._refused(error)

    def _status(self) -> StatusReply:
        holding, plan, result = self._holding, self._holding.plan, self._holding.result
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
            report=result.report if result else None,
            tables=holding.tables,
            segments=tuple(
                SegmentStatus(info=s.info, huge_bytes=huge.get(s.info.id, 0), numa=self._config.host.numa)
                for s in holding.segments.values()
            ),
            leases=self._leases.snapshot(),
            lease_count=self._leases.held,
            failure=str(self._failure) if self._failure else None,
            adopted=holding.adopted,
            outlook=self._keeper.outlook,
            check=self._check.status,
        )

    def _enter(self, reached: State) -> None:
        self._state = state.follow(self._state, reached)
        log.debug("state: %s", self._state)

    def _refused(self, error: EngramError) -> Failed:
        """The answer to an attach, where the control socket does not see the error itself."""
        self._tally.count_refused("attach", error)
        return Failed.of(error)

    # Telling those who wait

    def _take_waiting(self) -> list[tuple[Asker, Attach]]:
        waiting = list(self._waiting.items())
        self._waiting.clear()
        return waiting

    def _tell_waiting(self, progress: Progress) -> None:
        asyncio.ensure_future(self._tell(progress))  # noqa: RUF006  sending never blocks: it is done at once

    async def _tell(self, progress: Progress) -> None:
        for asker in list(self._waiting):
            if not await self._reply(asker, progress):
                self._waiting.pop(asker, None)  # gone: it must take neither a place nor, in the end, a ticket

    async def _reply(self, asker: Asker, reply: Reply) -> bool:
        """False when the asker is gone."""
        return self._control is not None and await self._control.send(asker, reply)

    # Ending

    async def _drain(self) -> None:
        self._enter(State.DRAINING)
        self._manager.stopping()
        log.info("draining: %s", self._leases)
        for asker, _ in self._take_waiting():
            await self._reply(asker, self._refused(ServerDraining()))
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while self._owes_descriptors and time.monotonic() < deadline and not self._stop_now.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), 0.05)

    @property
    def _owes_descriptors(self) -> bool:
        return bool(self._leases.open_tickets) and self._handover is not None and self._handover.may_redeem

    async def _fail(self, error: Exception) -> None:
        self._failure = (
            error if isinstance(error, EngramError) else InternalError(doing="serving", problem=repr(error)[:500])
        )
        self._enter(State.FAILED)
        for asker, _ in self._take_waiting():
            await self._reply(asker, self._refused(self._load_failed()))

    def _load_failed(self) -> LoadFailed:
        failure = self._failure
        return LoadFailed(cause_code=failure.code if failure else "", cause=str(failure))

    async def _tear_down(self) -> None:
        if self._http is not None:
            await asyncio.to_thread(self._http.close)
        await self._check.stop()
        if self._control is not None:
            await self._control.close()
        if self._handover is not None:
            self._handover.close(self._load_failed() if self._failure else ServerDraining())
        await self._holding.give_up()
        self._lock.release()
