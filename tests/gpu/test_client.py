"""Daemon and GPU ranks end to end on a real GPU, bit for bit what the checkpoint's files and the CPU lookup give.

Ranks that share a GPU exchange through gloo, for NCCL refuses them; tests that need two GPUs say so in their names.
Groups on GPUs of their own: test_groups.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from engram_client import connect  # noqa: E402
from engram_client.cuda.access import DRIVER_VARIABLE, cuda_driver  # noqa: E402
from engram_client.cuda.driver import HandleTypes, Location  # noqa: E402
from engram_client.errors import IdsDeviceInvalid, InvalidIds, OutInvalid  # noqa: E402
from engram_client.gpu import GpuTables, prepare  # noqa: E402
from engram_client.identity import TableIdentity  # noqa: E402
from engram_client.layout import RowFormat, TableGeometry, whole  # noqa: E402
from engram_client.mapping.segments import map_for_cpu, map_for_gpu  # noqa: E402
from engram_client.protocol import Backing, SegmentInfo, State, TableInfo  # noqa: E402
from tests.gpu.asking_ranks import ask, bits, daemon_of  # noqa: E402
from tests.support.asking import Asking  # noqa: E402
from tests.support.daemon import Daemon  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.reference import CheckpointReference  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
if os.environ.get(DRIVER_VARIABLE):
    pytest.skip("needs the real driver", allow_module_level=True)

DEVICES = torch.cuda.device_count()
LIMIT_S = 120
PAGE = 2 << 20
two_gpus = pytest.mark.skipif(DEVICES < 2, reason="needs two GPUs")
WHOLE = {"placement": "cpu", "replication": "per_node"}
GPU_WHOLE = {"placement": "gpu", "replication": "per_node"}
PEERS = {"placement": "gpu", "lookup": "peer_read"}


@pytest.fixture
def host_table(folder: Path, checkpoint: Path) -> Iterator[Daemon]:
    with daemon_of(folder, checkpoint, WHOLE, host={"backing": "memfd"}) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("engram", "ranks", "rest"),
    [
        (WHOLE, 2, {"host": {"backing": "memfd"}}),
        (WHOLE, 1, {"host": {"backing": "posix_shm", "keep": "off"}}),
        (WHOLE, 2, {"host": {"backing": "cuda_host"}}),
        ({"placement": "cpu"}, 3, {"host": {"backing": "cuda_host"}, "tp_size": 3}),
        ({"placement": "gpu"}, 2, {"tp_size": 2, "devices": [0, 0]}),
        ({"placement": "gpu"}, 5, {"tp_size": 5, "devices": [0] * 5}),
        (PEERS, 8, {"tp_size": 8, "devices": [0] * 8}),
        (GPU_WHOLE, 8, {"devices": [0]}),
    ],
    ids=["memfd", "posix_shm", "cuda_host", "host-shards", "collective-2", "collective-5", "peer_read-8", "per_node-8"],
)
def test_every_configuration_gives_the_checkpoints_rows(
    folder: Path, checkpoint: Path, engram: dict[str, str], ranks: int, rest: dict[str, Any]
) -> None:
    with daemon_of(folder, checkpoint, engram, **rest) as daemon:
        compared = run_ranks(ranks, ask, daemon.endpoint, str(checkpoint), timeout_s=LIMIT_S)
        assert min(compared) > 70_000
        assert daemon.status().state is State.READY


@two_gpus
def test_on_two_gpus_ids_on_the_other_are_refused_and_its_being_current_is_not(
    host_table: Daemon, checkpoint: Path
) -> None:
    reference = CheckpointReference(checkpoint)
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:1") as client, torch.cuda.device(0):
        with pytest.raises(IdsDeviceInvalid):
            client.table(1).lookup(torch.zeros(3, dtype=torch.int64, device="cuda:0"))
        Asking(client, reference, torch.device("cuda", 1), lambda: torch.cuda.synchronize(1)).everything()


def test_the_gpu_and_the_cpu_client_agree_on_every_row_and_every_code(host_table: Daemon) -> None:
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as gpu:
        with connect(host_table.endpoint, rank=0, world_size=1) as cpu:
            for layer in gpu.layers:
                ids = torch.randperm(gpu.table(layer).rows)
                ours = gpu.table(layer).lookup(ids.cuda())
                assert np.array_equal(bits(ours), bits(cpu.table(layer).lookup(ids)))
                raw = gpu.table(layer).lookup(ids.cuda(), raw=True)
                assert len(torch.unique(raw.values)) == 256
                assert len(torch.unique(raw.scales)) == 256


# CUDA graphs


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("placement", ["cpu", "gpu"])
def test_a_captured_lookup_follows_its_ids_for_a_thousand_replays(
    folder: Path, checkpoint: Path, placement: str
) -> None:
    with daemon_of(folder, checkpoint, {"placement": placement, "replication": "per_node"}, devices=[0]) as daemon:
        with connect(daemon.endpoint, rank=0, world_size=1, device="cuda:0") as client:
            table = client.table(1)
            every = table.lookup(torch.arange(table.rows, device="cuda"))
            ids = torch.zeros(32, 24, dtype=torch.int64, device="cuda")
            out = torch.empty(32, 24, 256, dtype=torch.bfloat16, device="cuda")
            table.lookup(ids, out)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                table.lookup(ids, out)
            good = torch.ones((), dtype=torch.bool, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                table.lookup(ids, out)  # waits for nothing, eagerly
                for _ in range(1000):
                    ids.random_(0, table.rows)
                    graph.replay()
                    good &= (out.view(torch.int16) == every.view(torch.int16)[ids]).all()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert good.item()
            counts = "allocation.all.allocated"  # ever made: what is given back at once counts too
            before = torch.cuda.memory_stats()[counts]
            for _ in range(10):
                graph.replay()
                table.lookup(ids, out)
            assert torch.cuda.memory_stats()[counts] == before


def test_a_captured_prefetch_follows_its_ids_and_keeps_its_buffers(host_table: Daemon) -> None:
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as client:
        tables = [client.table(layer) for layer in client.layers]
        every = [table.lookup(torch.arange(table.rows, device="cuda")) for table in tables]
        for tokens in (16, 800):  # the second is put in order of address
            ids = torch.zeros(tokens, 2, 24, dtype=torch.int64, device="cuda")
            first = [table.prefetch(ids[:, i]).wait().data_ptr() for i, table in enumerate(tables)]
            outs = [torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device="cuda") for _ in tables]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                begun = [table.prefetch(ids[:, i]) for i, table in enumerate(tables)]
                for out, pending in zip(outs, begun, strict=True):
                    out.copy_(pending.wait())
            assert [pending.wait().data_ptr() for pending in begun] == first
            for _ in range(50):
                ids.random_(0, min(table.rows for table in tables))
                graph.replay()
                for index, out in enumerate(outs):
                    expected = every[index].view(torch.int16)[ids[:, index]]
                    assert torch.equal(out.view(torch.int16), expected)
            assert [table.prefetch(ids[:, i]).wait().data_ptr() for i, table in enumerate(tables)] == first


def test_a_slow_second_prefetch_does_not_hold_the_first_layers_consumer(host_table: Daemon, checkpoint: Path) -> None:
    reference = CheckpointReference(checkpoint)
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as client:
        ids = torch.arange(48, device="cuda").view(2, 24)
        side = client._gpu._side._stream  # type: ignore[union-attr]
        for layer in client.layers:
            client.table(layer).prefetch(ids).wait()
        torch.cuda.synchronize()
        first = client.table(1).prefetch(ids)
        with torch.cuda.stream(side):
            torch.cuda._sleep(3_000_000_000)  # more than a second
        slow = torch.cuda.Event()
        second = client.table(14).prefetch(ids)
        slow.record(side)
        rows = bits(first.wait())  # comes to the CPU: the first layer's consumer has all it needs
        assert not slow.query(), "the second was over before: nothing was shown"
        assert np.array_equal(rows, reference.rows(1, ids.cpu().numpy()).view(np.int16))
        assert np.array_equal(bits(second.wait()), reference.rows(14, ids.cpu().numpy()).view(np.int16))


def test_prefetches_are_counted_as_hits_or_late_without_a_wait_and_without_harm_to_a_capture_elsewhere(
    host_table: Daemon,
) -> None:
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as client:
        table = client.table(1)
        ids = torch.arange(48, device="cuda").view(2, 24)
        expected = table.lookup(ids).clone()
        meter = client._reporter.meter(1)
        side = client._gpu._side._stream  # type: ignore[union-attr]
        table.prefetch(ids).wait()
        torch.cuda.synchronize()
        meter.prefetch_hits = meter.prefetch_late = 0
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)
        late = table.prefetch(ids)
        late.wait()
        assert (meter.prefetch_hits, meter.prefetch_late) == (0, 1)
        in_time = table.prefetch(ids)
        torch.cuda.synchronize()
        graph, static = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
        rows: list[torch.Tensor] = []
        with torch.cuda.graph(graph):  # in the mode that forbids much to all threads
            static += 1
            other = threading.Thread(target=lambda: rows.append(in_time.wait()))
            other.start()
            other.join()
            static += 1
        graph.replay()
        assert static.eq(2).all()
        assert torch.equal(rows[0].view(torch.int16), expected.view(torch.int16))
        assert (meter.prefetch_hits, meter.prefetch_late) == (1, 1)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            table.prefetch(ids).wait()
        assert (meter.prefetch_hits, meter.prefetch_late) == (1, 1), "a graph's waits are its own"


# Use


def test_strict_raises_at_the_next_eager_lookup_or_check_and_never_in_a_capture(host_table: Daemon) -> None:
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0", strict=True) as client:
        table = client.table(1)
        bad = torch.tensor([[0, -1, table.rows, 2**62]], device="cuda")
        good, out = torch.zeros_like(bad), torch.empty(1, 4, 256, dtype=torch.bfloat16, device="cuda")
        table.lookup(good, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.lookup(bad, out)
        graph.replay()
        torch.cuda.synchronize()
        assert not out[0, 1:].any()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            table.lookup(good, out)
        with pytest.raises(InvalidIds) as caught:
            table.lookup(good, out)
        assert (caught.value.layer_id, caught.value.count) == (1, 2)
        table.lookup(good, out)
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(InvalidIds):
            client.check()
        client.check()
        assert table.invalid_ids == 4


def test_wrong_outs_and_devices_are_refused_and_later_lookups_work(host_table: Daemon, checkpoint: Path) -> None:
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as client:
        table, ids = client.table(1), torch.arange(48, device="cuda").view(2, 24)
        with pytest.raises(IdsDeviceInvalid):
            table.lookup(ids.cpu())
        flat = torch.empty(2 * 24 * 256 + 1, dtype=torch.bfloat16, device="cuda")
        for out in (
            torch.empty(2, 24, 256, dtype=torch.bfloat16),
            torch.empty(2, 24, 256, device="cuda"),
            torch.empty(2, 24, 512, dtype=torch.bfloat16, device="cuda")[..., ::2],
            flat[1:].view(2, 24, 256),
        ):
            with pytest.raises(OutInvalid):
                table.lookup(ids, out)
        expected = CheckpointReference(checkpoint).rows(1, ids.cpu().numpy()).view(np.int16)
        assert np.array_equal(bits(table.lookup(ids)), expected)


def test_a_thread_that_never_used_cuda_can_look_up(host_table: Daemon, checkpoint: Path) -> None:
    expected = CheckpointReference(checkpoint).rows(1, np.arange(48).reshape(2, 24)).view(np.int16)
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as client:
        ids = torch.arange(48, device="cuda").view(2, 24)
        out = torch.empty(2, 24, 256, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        found: list[Any] = []

        def work() -> None:
            try:
                client.table(1).lookup(ids, out)
                torch.cuda.synchronize()
                found.append(bits(out))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        assert np.array_equal(found[0], expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_looks_up_without_a_graph_break(host_table: Daemon, checkpoint: Path) -> None:
    ids = torch.arange(-2, 46, device="cuda").view(2, 24)
    expected = CheckpointReference(checkpoint).rows(14, ids.cpu().numpy()).view(np.int16)
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as client:
        table = client.table(14)

        def plain(ids: torch.Tensor) -> torch.Tensor:
            return table.lookup(ids + 0).flatten(1)

        def given(ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            table.lookup(ids, out)
            return out.flatten(1)

        out = torch.zeros(2, 24, 256, dtype=torch.bfloat16, device="cuda")
        torch.compiler.reset()
        rows = torch.compile(plain, fullgraph=True, backend="aot_eager")(ids)
        assert np.array_equal(bits(rows).reshape(2, 24, 256), expected)
        compiled = torch.compile(given, fullgraph=True, backend="aot_eager")
        compiled(ids, out)
        assert np.array_equal(bits(out), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compiled(ids, out)
        out.zero_()
        graph.replay()
        assert np.array_equal(bits(out), expected)


def test_rows_of_a_table_of_full_size_are_found() -> None:
    """94 GiB of GPU memory (or what is free) of which a few rows are written: offsets are 64 bits everywhere."""
    driver, kernels = cuda_driver(), prepare(0)
    free = torch.cuda.mem_get_info()[0] - (4 << 30)
    nbytes = min(94 << 30, free) // PAGE * PAGE
    column = nbytes // 264 // 24
    geometry = TableGeometry(layer_id=1, columns=(column,) * 24)
    handle = driver.mem_create(nbytes, Location.device(0), HandleTypes.POSIX_FD)
    fd = driver.export_fd(handle)
    rows = geometry.rows
    for row_format in RowFormat:
        info = SegmentInfo(
            id="L1",
            layer_id=1,
            shard=whole(geometry),
            rank=None,
            nbytes=nbytes,
            backing=Backing.CUDA_DEVICE,
            row_format=row_format,
            page_bytes=PAGE,
            device=driver.device_uuid(0),
        )
        chosen = [0, 2**32 // 264, 2**32 // 264 + 1, 2**32 // 256, 2**36 // 264, rows - 2, rows - 1]
        chosen = [row for row in chosen if row < rows]
        write_rows(handle, nbytes, rows, chosen, row_format)
        mapped = map_for_gpu([info], {"L1": fd}, 0)
        table = TableInfo(geometry=geometry, identity=TableIdentity.of(geometry, None), segments=(info,))
        tables = GpuTables(kernels, [table])
        local, everything = tables.rows(table, mapped)
        assert everything
        raw = local.lookup_raw(torch.tensor(chosen, device="cuda"), hashed=False).rows
        expected = (torch.arange(len(chosen))[:, None] * 31 + torch.arange(264) * 7 + 1).to(torch.uint8)
        assert torch.equal(raw.cpu(), expected)
        tables.close()
        for mapping in mapped.values():
            mapping.close()
    os.close(fd)
    driver.mem_release(handle)


def write_rows(handle: int, nbytes: int, rows: int, chosen: list[int], row_format: RowFormat) -> None:
    driver = cuda_driver()
    with driver.context(0):
        address = driver.address_reserve(nbytes, PAGE)
        driver.mem_map(address, nbytes, handle)
        driver.set_access(address, nbytes, (Location.device(0),), writable=True)
        stream = driver.stream_create()
        for index, row in enumerate(chosen):
            row_bytes = [(index * 31 + k * 7 + 1) % 256 for k in range(264)]
            for k, byte in enumerate(row_bytes):
                if k % 4 == 0:
                    packed = row_format is RowFormat.PACKED
                    at = row * 264 + k if packed else row * 256 + k if k < 256 else rows * 256 + row * 8 + k - 256
                    word = int.from_bytes(bytes(row_bytes[k : k + 4]), "little")
                    driver.memset_words_async(address + at, word, 1, stream)
                assert 0 <= byte < 256
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
        driver.mem_unmap(address, nbytes)
        driver.address_free(address, nbytes)


def test_rows_that_straddle_registered_ranges_are_right(host_table: Daemon, checkpoint: Path) -> None:
    from engram_client.control import ControlConnection
    from engram_client.handover import HandoverConnection
    from engram_client.protocol import Attach, Attached

    reference = CheckpointReference(checkpoint)
    with HandoverConnection.open(str(host_table.handover_path), 30) as lease:
        with ControlConnection(host_table.endpoint, lease) as control:
            request = Attach(rank=0, world_size=1, device="cuda:0", name="test")
            attached = next(r for r in control.request(request, 30, "attaching") if isinstance(r, Attached))
        descriptors = lease.redeem(attached.ticket, 30)
        segments = [segment for table in attached.tables for segment in table.segments]
        mapped = map_for_gpu(segments, descriptors, 0, range_bytes=PAGE)
        on_cpu = map_for_cpu(segments, descriptors)
        for descriptor in descriptors.values():
            os.close(descriptor)
        tables = GpuTables(prepare(0), attached.tables)
        for table in attached.tables:
            local, _ = tables.rows(table, mapped)
            ids = np.concatenate([np.arange(at // 264 - 1, at // 264 + 2) for at in range(PAGE, 4 * PAGE, PAGE)])
            found = local.lookup(torch.from_numpy(ids).cuda(), hashed=False).rows
            assert np.array_equal(bits(found), reference.rows(table.geometry.layer_id, ids).view(np.int16))
        tables.close()
        for mapping in (*mapped.values(), *on_cpu.values()):
            mapping.close()


# Ranks that do wrong


@pytest.mark.parametrize("how", ["table", "wild"])
@pytest.mark.parametrize(
    ("engram", "rest"),
    [(WHOLE, {"devices": [0]}), (GPU_WHOLE, {"devices": [0]}), (PEERS, {"devices": [0, DEVICES - 1], "tp_size": 2})],
    ids=["host", "gpu", "peer_read"],
)
def test_a_rank_that_writes_is_refused_while_daemon_and_others_go_on(
    folder: Path, checkpoint: Path, engram: dict[str, str], rest: dict[str, Any], how: str
) -> None:
    """With peer_read the rank writes to another rank's shard, on the last GPU there is."""
    reference, size = CheckpointReference(checkpoint), rest.get("tp_size", 1)
    other = size - 1, f"cuda:{DEVICES - 1 if size > 1 else 0}"  # whose shard it is
    with daemon_of(folder, checkpoint, engram, **rest) as daemon:
        with connect(daemon.endpoint, rank=other[0], world_size=size, device=other[1]) as client:
            command = [sys.executable, "-m", "tests.gpu.client_child", how, daemon.endpoint, str(size)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            assert done.stdout.strip().startswith("CUDA_ERROR_"), done.stdout + done.stderr
            assert client.server_alive
            with torch.cuda.device(other[1]):
                Asking(client, reference, torch.device(other[1]), torch.cuda.synchronize).everything()
        with connect(daemon.endpoint, rank=0, world_size=size, device="cuda:0") as client:
            assert client.table(1).lookup(torch.zeros(1, dtype=torch.int64, device="cuda")).isfinite().any()
        assert daemon.status().state is State.READY


def test_lookups_go_on_when_the_daemon_is_killed(host_table: Daemon, checkpoint: Path) -> None:
    reference = CheckpointReference(checkpoint)
    with connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0") as client:
        host_table.kill()
        Asking(client, reference, torch.device("cuda", 0), torch.cuda.synchronize).everything()
        assert not client.server_alive
