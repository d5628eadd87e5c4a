"""What the daemon holds: the plan, its segments and tables; taken over from an earlier daemon, or loaded."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping

import msgspec

from engram_client.errors import AdoptError, CheckpointError, InternalError, LoaderDied, MapFailed
from engram_client.identity import TableIdentity
from engram_client.protocol import LoadProgress, Replication, State, TableInfo
from engram_server import adopt, gpus, origin, preflight, sample
from engram_server.bring_up import allocate_and_load
from engram_server.checkpoint import TableSource, read_model_geometry
from engram_server.config import Config
from engram_server.exports import Exports
from engram_server.keep import Keeper
from engram_server.load_job import LoadResult, make_job
from engram_server.machine import Machine
from engram_server.manifest import MANIFEST_VERSION, Manifest
from engram_server.plan import Plan, make_plan
from engram_server.segments import Segment, discard_all
from engram_server.worker import in_thread

log = logging.getLogger(__name__)


class Holding:
    """The tables of one daemon. `obtain` once, then `give_up` once, also after a failure."""

    def __init__(self, config: Config, tag: str, epoch: str, keeper: Keeper) -> None:
        self._config = config
        self._tag = tag
        self._epoch = epoch
        self._keeper = keeper
        self.plan: Plan | None = None
        self.segments: dict[str, Segment] = {}
        """By id, in the plan's order."""
        self.result: LoadResult | None = None
        self.tables: tuple[TableInfo, ...] = ()
        self.adopted = False
        """Whether nothing had to be loaded."""
        self.exports = Exports()
        """What ranks of other nodes map this node's shards by."""
        self._manifest: Manifest | None = None

    def __repr__(self) -> str:
        return f"<Holding of {len(self.tables)} tables, {len(self.segments)} segments>"

    async def obtain(self, enter: Callable[[State], None], on_progress: Callable[[LoadProgress], None]) -> None:
        """Takes over what is there and loads the rest; `enter` hears when loading begins.

        Raises an EngramError: of the checkpoint, the plan, the memory or the loader.
        """
        adoption = await self._adopt()
        taken = frozenset(self.segments) if adoption is not None else frozenset()
        if adoption is not None and not adoption.missing:
            manifest = adoption.manifest
            self.result, self.tables = manifest.result, manifest.tables
            self.adopted = True
            self._keeper.confirm(manifest, adoption.by_name)
            log.info("took over %d segments, loaded by daemon %s", len(self.segments), manifest.epoch)
        else:
            manifest = await self._load(adoption, enter, on_progress)
            self._keeper.keep(manifest, list(self.segments.values()))
        self._manifest = manifest
        # To its end even when stopped: the driver must not be asked for memory that is given up meanwhile.
        self.exports = await in_thread(Exports.of, self.planned, list(self.segments.values()), taken)
        if self.exports.problem:
            log.warning("ranks cannot attach: %r", self.exports)
        for table in self.tables:
            log.info("layer %d: %d rows, root %s", table.geometry.layer_id, table.geometry.rows, table.identity.root)

    async def give_up(self) -> None:
        """Closes the segments; what is not kept for the next daemon is gone with them when this returns."""
        await in_thread(self._close_all if self._keeper.kept else self._discard_all)

    def _close_all(self) -> None:
        for segment in self.segments.values():
            segment.close()

    def _discard_all(self) -> None:
        discard_all(self.segments.values())

    @property
    def damaged(self) -> frozenset[str]:
        """Ids of segments that a check has found damaged."""
        return frozenset(self._manifest.damaged if self._manifest else ())

    def mark_damaged(self, names: Collection[str]) -> None:
        """The next daemon loads the tables of these segments again, however it came to its end."""
        if self._manifest is None or not names:
            return
        damaged = tuple(sorted(self.damaged | set(names)))
        self._manifest = msgspec.structs.replace(self._manifest, damaged=damaged)
        if self._keeper.kept:
            self._keeper.keep(self._manifest, list(self.segments.values()))

    # Taking over

    async def _adopt(self) -> adopt.Adoption | None:
        """What an earlier daemon left and this one may serve; its segments are ours then. Sets the plan."""
        # To its end even when stopped: it removes names, which the next daemon may take as soon as this one is gone.
        kept = await in_thread(self._keeper.find)
        if kept is None:
            return None
        adoption: adopt.Adoption | None = None
        try:
            adoption = await in_thread(adopt.take, kept, self._config, self._tag)
            checking = asyncio.ensure_future(in_thread(adopt.spot_check, adoption, self._threads))
            try:
                plan = await asyncio.to_thread(self._plan_for, kept.manifest)
                plan = adopt.fitted(plan, kept.manifest, self._config)
                await checking
            finally:
                checking.cancel()
                await asyncio.gather(checking, return_exceptions=True)
        except (AdoptError, MapFailed, LoaderDied) as error:
            log.warning("%s: %s", error.code, error)
            if adoption is not None:
                await in_thread(adopt.release, adoption)
            # A checkpoint that cannot be loaded ends the daemon here, with what was kept still in place.
            await asyncio.to_thread(preflight.read_source, self._config)
            await in_thread(self._keeper.forget, kept.manifest.folder)
            return None
        except BaseException:  # stopped, or the configuration is refused: what is kept stays
            if adoption is not None:
                await in_thread(adopt.release, adoption)
            raise
        self._accept(plan)
        self.segments = {segment.info.id: segment for segment in adoption.segments}
        if adoption.missing:
            await in_thread(self._keeper.forget, kept.manifest.folder, list(self.segments))
        return adoption

    def _plan_for(self, manifest: Manifest) -> Plan:
        """The plan of this configuration, for memory that is taken already."""
        config = self._config
        try:
            # config.json alone: the tables' files need not even be there
            model = manifest.model if config.geometry is not None else read_model_geometry(str(config.model_path))
        except CheckpointError as error:
            if not origin.unreadable(manifest.origin):
                raise
            log.warning("%s", error)  # gone, not changed: its shape is still known
            model = manifest.model
        machine = Machine.read(folder=config.host.path)
        found = manifest.gpus
        if found is None or found.asked != gpus.question(config) or manifest.options.reads_across_nodes:
            found = gpus.read(config)
        return make_plan(config, model, machine, found, check_resources=False)

    # Loading

    async def _load(
        self,
        adoption: adopt.Adoption | None,
        enter: Callable[[State], None],
        on_progress: Callable[[LoadProgress], None],
    ) -> Manifest:
        """Loads all tables, or those that could not be taken over."""
        prepared = await asyncio.to_thread(
            functools.partial(preflight.prepare, self._config, check_resources=adoption is None)
        )
        model, sources = prepared.source.model, prepared.source.tables
        made_from = origin.origin_of(self._config, sources)
        if adoption is None:
            self._accept(prepared.plan)
        for finding in prepared.findings:
            log.warning("%s: %s; %s", finding.id, finding.seen, finding.remedy)
        plan = self.planned if adoption is None else adopt.only(self.planned, adoption.missing)
        if sources is not None:
            wanted = {table.layer_id for table in plan.tables}
            sources = tuple(source for source in sources if source.geometry.layer_id in wanted)
        enter(State.LOADING)
        job = make_job(plan, self._config, sources, prepared.machine.cpus)
        stop = threading.Event()
        sampling = asyncio.ensure_future(asyncio.to_thread(self._sample, plan, sources, stop))
        try:
            result = await allocate_and_load(plan, self._tag, job, self.segments, on_progress)
            samples = await sampling
        finally:
            stop.set()
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        for segment in self.segments.values():
            segment.seal()
        _log_loaded(result)
        self.result = result if adoption is None else adopt.merge(adoption, result)
        order = {info.id: place for place, info in enumerate(self.planned.segments)}
        self.segments = dict(sorted(self.segments.items(), key=lambda item: order[item[0]]))
        kept = () if adoption is None else adoption.manifest.tables
        samples = {table.geometry.layer_id: table.sample for table in kept} | samples
        self.tables = self._table_infos(self.result, samples)
        return Manifest(
            version=MANIFEST_VERSION,
            epoch=self._epoch,
            tag=self._tag,
            options=self.planned.options,
            folder=self.planned.folder,
            origin=made_from,
            model=model,
            tables=self.tables,
            result=self.result,
            gpus=prepared.gpus,
        )

    def _accept(self, plan: Plan) -> None:
        self.plan = plan
        for remark in plan.remarks:
            log.warning("%s", remark)
        log.info("%s", plan.log_line)

    def _sample(
        self, plan: Plan, sources: tuple[TableSource, ...] | None, stop: threading.Event
    ) -> dict[int, str | None]:
        """By layer: what tells tables of equal shape apart where no node reads all of one."""
        options = plan.options
        if options.replication is Replication.PER_NODE or options.nnodes == 1:
            return {}
        if sources is None:
            return {**sample.generated_digests(plan.tables, self._config.seed)}
        return {**sample.sample_digests(sources, stop)}

    def _table_infos(self, result: LoadResult, samples: Mapping[int, str | None]) -> tuple[TableInfo, ...]:
        return tuple(
            TableInfo(
                geometry=geometry,
                identity=TableIdentity.of(geometry, result.roots.get(geometry.layer_id)),
                segments=tuple(s.info for s in self.segments.values() if s.info.layer_id == geometry.layer_id),
                sample=samples.get(geometry.layer_id),
            )
            for geometry in self.planned.tables
        )

    @property
    def planned(self) -> Plan:
        if self.plan is None:
            raise InternalError(doing="serving", problem="there is no plan yet")
        return self.plan

    @property
    def _threads(self) -> int:
        return self._config.load.threads or os.cpu_count() or 1


def _log_loaded(result: LoadResult) -> None:
    report = result.report
    for remark in result.remarks:
        log.warning("%s", remark)
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
