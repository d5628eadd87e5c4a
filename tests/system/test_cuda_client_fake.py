"""GPU ranks end to end on the fake driver: real daemon and rank processes, kernels as numpy."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engram_client import connect
from engram_client.control import query_status
from engram_client.cuda.access import cuda_driver
from engram_client.errors import (
    CountsInvalid,
    CudaCallFailed,
    CudaUnavailable,
    EngramError,
    IdsDeviceInvalid,
    IdsDtypeInvalid,
    IdsShapeInvalid,
    InvalidIds,
    OutInvalid,
    PeerAccessMissing,
)
from engram_client.gpu import prepare
from engram_client.lookup import runtime
from engram_client.lookup.shapes import SORT_FROM_IDS
from tests.support import fake_runtime
from tests.support.asking import Asking, hashed_ids, starts_of
from tests.support.daemon import Daemon, running, wait_until
from tests.support.fake_driver import FakeDriver
from tests.support.fake_machinery import calls_in, kernels_in
from tests.support.fake_runtime import FAKE, on_fake
from tests.support.ranks import RankFailed, run_ranks
from tests.support.reference import CheckpointReference


@contextmanager
def daemon_of(
    folder: Path, checkpoint: Path, engram: dict[str, str], machine: dict[str, Any], **rest: Any
) -> Iterator[Daemon]:
    config = {"model_path": str(checkpoint), "engram_config": engram, **rest}
    with running(folder, config, environ=FAKE | {"ENGRAM_FAKE_CUDA": json.dumps(machine)}) as daemon:
        yield daemon


def ask_everything(rank: int, world_size: int, endpoint: str, checkpoint: str, machine: dict[str, Any]) -> int:
    """Every way of asking, against the checkpoint's files; the number of rows compared."""
    on_fake(machine)
    device = f"cuda:{rank % machine['gpus']}"
    with connect(endpoint, rank=rank, world_size=world_size, device=device) as client:
        assert client.layers == (1, 14)
        reference = CheckpointReference(Path(checkpoint))
        compared = Asking(client, reference, torch.device("cpu"), lambda: None).everything()
    driver = cuda_driver()
    assert isinstance(driver, FakeDriver)
    assert driver.leaks() == [f"1 of context {rank % machine['gpus']}"], "the kernels' own"
    return compared


@pytest.mark.parametrize(
    ("engram", "host", "world_size", "gpus"),
    [
        ({"placement": "cpu", "replication": "per_node"}, "cuda_host", 1, 1),
        ({"placement": "cpu", "replication": "per_node"}, "memfd", 1, 1),
        ({"placement": "cpu"}, "posix_shm", 3, 2),
        ({"placement": "gpu"}, "auto", 2, 2),
        ({"placement": "gpu"}, "auto", 5, 5),
        ({"placement": "gpu", "lookup": "peer_read"}, "auto", 2, 2),
        ({"placement": "gpu", "lookup": "peer_read"}, "auto", 3, 3),
        ({"placement": "gpu", "lookup": "peer_read"}, "auto", 4, 1),
        ({"placement": "gpu", "replication": "per_node"}, "auto", 3, 2),
        ({"placement": "gpu"}, "auto", 8, 8),
        ({"placement": "gpu", "lookup": "peer_read"}, "auto", 8, 8),
        ({"placement": "gpu", "replication": "per_node"}, "auto", 8, 8),
        ({"placement": "cpu"}, "memfd", 8, 8),
        ({"placement": "cpu", "replication": "per_node"}, "memfd", 8, 8),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_every_way_of_asking_gives_the_checkpoints_rows(
    folder: Path, checkpoint: Path, engram: dict[str, str], host: str, world_size: int, gpus: int
) -> None:
    machine = {"gpus": gpus}
    size: dict[str, Any] = {} if "replication" in engram else {"tp_size": world_size}
    if "gpu" in engram.values() and size and gpus < world_size:
        size["devices"] = [0] * world_size
    with daemon_of(folder, checkpoint, engram, machine, host={"backing": host, "keep": "off"}, **size) as daemon:
        compared = run_ranks(world_size, ask_everything, daemon.endpoint, str(checkpoint), machine, timeout_s=100)
        assert min(compared) > 4000


def attach_with_a_full_table(
    rank: int, world_size: int, endpoint: str, machine: dict[str, Any], free: int
) -> tuple[int, ...]:
    """Room in the process's table of descriptors: full but for `free`, after prepare(), after an attach."""
    on_fake(machine)
    prepare(0)
    sizes = [room_for_descriptors()]
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < sizes[0] - 1:
        taken.append(os.dup(taken[0]))
    for descriptor in taken[-free:]:
        os.close(descriptor)
    prepare(0)
    sizes.append(room_for_descriptors())
    with connect(endpoint, rank=rank, world_size=world_size, device="cuda:0"):
        sizes.append(room_for_descriptors())
    return tuple(sizes)


def room_for_descriptors() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("FDSize:"))
    return int(line.split()[1])


@pytest.mark.parametrize("gpus", [1, 4])
def test_prepare_makes_room_for_the_descriptors_of_an_attach(folder: Path, checkpoint: Path, gpus: int) -> None:
    machine = {"gpus": gpus}
    engram = {"placement": "gpu", "replication": "per_node"}
    with daemon_of(folder, checkpoint, engram, machine) as daemon:
        for free in (2, 16, 20, 30, 50):
            args = (daemon.endpoint, machine, free)
            ((full, prepared, attached),) = run_ranks(1, attach_with_a_full_table, *args, timeout_s=60)
            assert prepared > full
            assert attached == prepared


def prepare_without_a_context(rank: int, world_size: int) -> None:
    on_fake({"gpus": 1}, fail="cuDevicePrimaryCtxRetain:*:CUDA_ERROR_OUT_OF_MEMORY")

    def refused(ordinal: int) -> None:
        raise RuntimeError("what torch says of a GPU that gives no context")

    runtime.SideStream = refused  # type: ignore[assignment,misc]
    prepare(0)


def test_a_gpu_that_gives_no_context_is_the_drivers_error_and_not_torchs() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(1, prepare_without_a_context)
    assert isinstance(failed.value.error, CudaCallFailed)


def read_from_owners(rank: int, world_size: int, endpoint: str, checkpoint: str, columns_a_part: int) -> int:
    """Hashed ids of all kinds, good ones and others, and any columns of them; the number of rows compared."""
    on_fake({"gpus": 8})
    reference = CheckpointReference(Path(checkpoint))
    with connect(endpoint, rank=rank, world_size=world_size, device=f"cuda:{rank}") as client:
        asking = Asking(client, reference, torch.device("cpu"), lambda: None)
        for layer in client.layers:
            table = client.table(layer)
            local = table.local  # type: ignore[attr-defined]
            assert local.source(True).columns_a_part == columns_a_part
            starts = starts_of(table.columns)
            ids = hashed_ids(table.columns, 9, seed=rank)
            ids[3], ids[4] = torch.from_numpy(starts[:-1]), torch.from_numpy(starts[1:] - 1)
            ids[5], ids[6, 1:] = torch.from_numpy(starts[1:]), torch.from_numpy(starts[1:-1] - 1)
            ids[7, :3] = torch.tensor([table.rows - 1, table.rows, 2**62])
            asking.same(table.lookup(ids, hashed=True), layer, ids, True)
            expected = table.lookup(ids, hashed=True)
            for first, last in ((0, 24), (0, 1), (5, 17), (23, 24)):
                rows = local.lookup(ids, hashed=True, columns=(first, last)).rows
                assert torch.equal(rows.view(torch.int16), expected[:, first:last].view(torch.int16))
            inside = (ids.numpy() >= starts[:-1]) & (ids.numpy() < starts[1:])
            found = table.lookup(ids, raw=True, hashed=True)
            for part, wanted in zip(found, reference.raw(layer, np.where(inside, ids.numpy(), 0)), strict=True):
                wanted = wanted.reshape(part.shape)
                assert np.array_equal(part.numpy(), np.where(inside[..., None], wanted, 0))
        asking.all_layers()
        return asking.compared


@pytest.mark.parametrize(("world_size", "columns_a_part"), [(2, 12), (3, 8), (4, 6), (5, 0), (8, 3)])
def test_hashed_ids_are_read_from_the_owner_of_their_column(
    folder: Path, checkpoint: Path, world_size: int, columns_a_part: int
) -> None:
    engram = {"placement": "gpu", "lookup": "peer_read"}
    size = {"tp_size": world_size, "devices": list(range(world_size))}
    with daemon_of(folder, checkpoint, engram, {"gpus": 8}, **size) as daemon:
        compared = run_ranks(world_size, read_from_owners, daemon.endpoint, str(checkpoint), columns_a_part)
    assert min(compared) > 600


# One rank of a whole table in host memory


@pytest.fixture
def host_table(folder: Path, checkpoint: Path) -> Iterator[Daemon]:
    whole = {"placement": "cpu", "replication": "per_node"}
    with daemon_of(folder, checkpoint, whole, {"gpus": 2}, host={"backing": "memfd"}) as daemon:
        yield daemon


def use_strictly(rank: int, world_size: int, endpoint: str) -> None:
    on_fake({"gpus": 2})
    with connect(endpoint, rank=0, world_size=1, device="cuda:1", strict=True) as client:
        table = client.table(1)
        good, bad = torch.tensor([[1, 2, 3, -1]]), torch.tensor([[5, table.rows, -7, 2**40]])
        out = torch.empty(1, 4, 256, dtype=torch.bfloat16)
        for again in (lambda: table.lookup(good), lambda: table.lookup(good, out), lambda: table.prefetch(good)):
            assert not table.lookup(bad)[0, 1].any()
            fake_runtime.capturing = True
            table.lookup(good)  # a capture goes on
            fake_runtime.capturing = False
            with pytest.raises(InvalidIds) as caught:
                again()
            assert (caught.value.layer_id, caught.value.count) == (1, 2)
            assert (caught.value.first, caught.value.position) == (table.rows, 1)
            again()
        assert table.invalid_ids == 6
        client.check()
        client.table(14).lookup(torch.tensor([2**62]))
        with pytest.raises(InvalidIds) as caught:
            client.check()
        assert caught.value.layer_id == 14


def test_a_strict_client_raises_at_the_next_eager_call_and_never_in_a_capture(host_table: Daemon) -> None:
    run_ranks(1, use_strictly, host_table.endpoint)


def use_wrongly(rank: int, world_size: int, endpoint: str, checkpoint: str) -> None:
    on_fake({"gpus": 2})
    reference = CheckpointReference(Path(checkpoint))
    with connect(endpoint, rank=0, world_size=1, device="cuda:0") as client:
        table = client.table(1)
        ids = torch.arange(48).view(2, 24)
        flat = torch.empty(2 * 24 * 256 + 1, dtype=torch.bfloat16)
        shape = 2, 24, 256
        outs: list[Any] = [
            torch.empty(2, 24, 255, dtype=torch.bfloat16),
            torch.empty(shape, dtype=torch.float16),
            torch.empty(2, 24, 512, dtype=torch.bfloat16)[..., :256],
            torch.empty(shape, dtype=torch.bfloat16, device="meta"),
            flat[1:].view(shape),
            (torch.empty(shape, dtype=torch.uint8), torch.empty(2, 24, 8, dtype=torch.uint8)),
        ]
        for out in outs:
            for _ in range(2):
                with pytest.raises(OutInvalid):
                    table.lookup(ids, out)
        values, scales = torch.empty(shape, dtype=torch.uint8), torch.empty(2, 24, 8, dtype=torch.uint8)
        for pair in (torch.empty(shape), (values, values), (scales, values), (values.half(), scales)):
            with pytest.raises(OutInvalid):
                table.lookup(ids, pair, raw=True)  # type: ignore[call-overload]
        good = torch.empty(shape, dtype=torch.bfloat16)
        for kind, error in (
            (ids.float(), IdsDtypeInvalid),
            (ids.to_sparse(), IdsDtypeInvalid),
            ([1, 2], IdsDtypeInvalid),
            (ids.to("meta"), IdsDeviceInvalid),
        ):
            for ask in (table.lookup, table.prefetch, client.lookup_all, lambda it: table.lookup(it, good)):
                with pytest.raises(error):
                    ask(kind)  # type: ignore[operator]
        for hashed in (ids[:, :23], torch.tensor(5)):
            with pytest.raises(IdsShapeInvalid):
                table.lookup(hashed, hashed=True)
        for both in (ids, ids.view(2, 1, 24), ids.view(1, 2, 24)[..., :3]):
            with pytest.raises(IdsShapeInvalid):
                client.lookup_all(both, hashed=True)
        with pytest.raises(CountsInvalid):
            table.lookup(ids, counts=[3])
        rows = table.lookup(ids, good)
        assert np.array_equal(rows.view(torch.int16).numpy(), reference.rows(1, ids.numpy()).view(np.int16))
        assert table.invalid_ids == 0


def test_wrong_arguments_are_errors_of_their_own_and_later_lookups_work(host_table: Daemon, checkpoint: Path) -> None:
    run_ranks(1, use_wrongly, host_table.endpoint, str(checkpoint))


def use_large_batches(rank: int, world_size: int, endpoint: str, checkpoint: str, log: str) -> None:
    on_fake({"gpus": 2})
    os.environ["ENGRAM_FAKE_LOG"] = log
    reference = CheckpointReference(Path(checkpoint))
    ids = torch.from_numpy(np.random.default_rng(3).integers(-1, 500, (SORT_FROM_IDS // 24 + 1, 24)))
    expected = reference.rows(1, ids.numpy()).view(np.int16)

    def kernels(ask: Callable[[], torch.Tensor]) -> list[str]:
        before = len(kernels_in(log))
        assert np.array_equal(ask().view(torch.int16).numpy(), expected)
        return kernels_in(log)[before:]

    with connect(endpoint, rank=0, world_size=1, device="cuda:0") as client:
        table = client.table(1)
        out = torch.empty(*ids.shape, 256, dtype=torch.bfloat16)
        ordered = ["order_count", "order_scan", "order_place", "gather_ordered_bf16", "fill_ordered_bf16"]
        fake_runtime.capturing = True
        assert kernels(lambda: table.lookup(ids, out)) == ["gather_few_packed_i64"], "a capture does not allocate"
        fake_runtime.capturing = False
        assert kernels(lambda: table.lookup(ids, out)) == ordered
        fake_runtime.capturing = True
        assert kernels(lambda: table.lookup(ids, out)) == ordered
        fake_runtime.capturing = False
        assert kernels(lambda: table.prefetch(ids).wait()) == ordered
        few = ids[:3]
        expected = expected[:3]
        first = table.prefetch(few).wait()
        assert table.prefetch(few).wait().data_ptr() == first.data_ptr()
        assert kernels(lambda: table.prefetch(few).wait()) == ["gather_bf16_w8_r1"]


def test_a_capture_sorts_only_where_memory_is_there_already(host_table: Daemon, checkpoint: Path, folder: Path) -> None:
    run_ranks(1, use_large_batches, host_table.endpoint, str(checkpoint), str(folder / "calls.log"))


def read_large_batches(rank: int, world_size: int, endpoint: str, checkpoint: str, log: str) -> tuple[str, list[str]]:
    """The kind of memory that a rank with ATS sees, and the kernels of an eager lookup and of a prefetch."""
    on_fake({"gpus": 1, "ats": True})
    os.environ["ENGRAM_FAKE_LOG"] = log
    ids = torch.from_numpy(np.random.default_rng(3).integers(-1, 500, (SORT_FROM_IDS // 24 + 1, 24)))
    expected = CheckpointReference(Path(checkpoint)).rows(1, ids.numpy()).view(np.int16)
    with connect(endpoint, rank=0, world_size=1, device="cuda:0") as client:
        table = client.table(1)
        for rows in (table.lookup(ids), table.prefetch(ids).wait()):
            assert np.array_equal(rows.view(torch.int16).numpy(), expected)
        return table.local.memory.value, kernels_in(log)  # type: ignore[attr-defined]


@pytest.mark.parametrize("backing", ["memfd", "cuda_host"])
def test_a_gpu_that_walks_the_hosts_page_tables_reads_host_tables_in_the_order_of_the_ids(
    folder: Path, checkpoint: Path, backing: str
) -> None:
    """Sorting holds reads back to what PCIe bears: a link that is coherent would stand idle."""
    whole, machine = {"placement": "cpu", "replication": "per_node"}, {"gpus": 1, "ats": True}
    with daemon_of(folder, checkpoint, whole, machine, host={"backing": backing}) as daemon:
        ((memory, kernels),) = run_ranks(
            1, read_large_batches, daemon.endpoint, str(checkpoint), str(folder / "calls.log")
        )
    assert memory == "coherent"
    assert len(kernels) == 2
    assert not any("order" in kernel for kernel in kernels)


class NoOperators(TorchDispatchMode):
    """Refuses everything that torch could allocate or compute with."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} during a lookup")


def look_up_into_rows(rank: int, world_size: int, endpoint: str, checkpoint: str, log: str) -> list[set[str]]:
    """The driver's calls in the second lookup of each kind."""
    on_fake({"gpus": 1})
    os.environ["ENGRAM_FAKE_LOG"] = log
    reference = CheckpointReference(Path(checkpoint))
    generator = np.random.default_rng(5)
    found = []
    with connect(endpoint, rank=0, world_size=1, device="cuda:0") as client:
        table = client.table(1)
        for tokens in (1, 40, SORT_FROM_IDS // 24 + 1):
            for dtype in (torch.int64, torch.int32):
                both = torch.from_numpy(generator.integers(-1, 500, (tokens, 2, 24))).to(dtype)
                ids, out = both[:, 1], torch.empty(tokens, 24, 256, dtype=torch.bfloat16)
                table.lookup(ids, out)
                out.fill_(3)
                before = len(calls_in(log))
                with NoOperators():
                    table.lookup(ids, out)
                found.append({event["call"] for event in calls_in(log)[before:]})
                expected = reference.rows(1, ids.numpy()).view(np.int16)
                assert np.array_equal(out.view(torch.int16).numpy(), expected)
    return found


def test_a_lookup_into_given_rows_launches_and_neither_allocates_nor_waits(
    host_table: Daemon, checkpoint: Path, folder: Path
) -> None:
    log = str(folder / "calls.log")
    (found,) = run_ranks(1, look_up_into_rows, host_table.endpoint, str(checkpoint), log)
    few, ordered = {"cuLaunchKernel"}, {"cuLaunchKernel", "cuMemsetD32Async"}
    assert found == [few] * 4 + [ordered] * 2


def count_prefetches(rank: int, world_size: int, endpoint: str, checkpoint: str) -> None:
    on_fake({"gpus": 2})
    reference = CheckpointReference(Path(checkpoint))
    ids = torch.arange(48).view(2, 24)
    with connect(endpoint, rank=0, world_size=1, device="cuda:0", name="counted") as client:

        def ask(layer: int) -> None:
            rows = client.table(layer).prefetch(ids).wait()
            assert np.array_equal(rows.view(torch.int16).numpy(), reference.rows(layer, ids.numpy()).view(np.int16))

        side, driver = client._gpu._side, cuda_driver()  # type: ignore[union-attr]
        assert isinstance(driver, FakeDriver)
        for late, captured, layer in ((0, 0, 1), (1, 0, 1), (1, 0, 14), (0, 1, 14), (0, 0, 14), (1, 1, 1), (0, 0, 1)):
            FakeDriver.late, FakeDriver.captured = {-1} if late else set(), {side.handle} if captured else set()
            waits = driver.waits
            ask(layer)
            # Rows that are there need no wait; a captured graph needs it whenever it is replayed.
            assert driver.waits - waits == (late or captured)
        begun = client.table(1).prefetch(ids)
        FakeDriver.captured = {runtime.current_stream(0)}  # a capture that the prefetch is no part of
        waits = driver.waits
        begun.wait()
        assert driver.waits == waits + 1, "left out when the rows happen to be there, it would pass now and then"
        FakeDriver.late, FakeDriver.captured = set(), set()

        def reported() -> tuple[int, int] | None:
            client.table(1).lookup(ids)  # what makes a report leave
            (lease,) = query_status(endpoint).leases
            found = lease.lookups.prefetch_hits, lease.lookups.prefetch_late
            return found if sum(found) >= 5 else None

        assert wait_until(reported, "a report") == (3, 2)


def test_prefetches_that_came_in_time_and_late_ones_are_counted_and_a_capture_is_never_asked(
    host_table: Daemon, checkpoint: Path
) -> None:
    run_ranks(1, count_prefetches, host_table.endpoint, str(checkpoint))


def compile_lookups(rank: int, world_size: int, endpoint: str, checkpoint: str) -> None:
    on_fake({"gpus": 2})
    reference = CheckpointReference(Path(checkpoint))
    with connect(endpoint, rank=0, world_size=1, device="cuda:0") as client:
        check_compiled(client.table(14), reference)
        check_compiled_client(client, reference)


def check_compiled(table: Any, reference: CheckpointReference) -> None:
    ids = torch.arange(-2, 46).view(2, 24)
    expected = reference.rows(14, ids.numpy()).view(np.int16)

    def plain(ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = table.lookup(ids * 1)
        return rows

    def given(ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.zero_()
        table.lookup(ids, out)
        return out.flatten(1)

    def raw(ids: torch.Tensor) -> torch.Tensor:
        values, scales = table.lookup(ids, raw=True)
        return torch.cat([values, scales], dim=-1)

    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        rows = torch.compile(plain, fullgraph=True, backend=backend)(ids)
        assert np.array_equal(rows.view(torch.int16).numpy(), expected)
        out = torch.full((2, 24, 256), 3.0, dtype=torch.bfloat16)
        torch.compile(given, fullgraph=True, backend=backend)(ids, out)
        assert np.array_equal(out.view(torch.int16).numpy(), expected)
        packed = torch.compile(raw, fullgraph=True, backend=backend)(ids)
        values, scales = reference.raw(14, np.maximum(ids.numpy(), 0))
        both = np.concatenate([values, scales], axis=1).reshape(2, 24, 264)
        assert np.array_equal(packed.numpy(), np.where(ids.numpy()[..., None] < 0, 0, both))


def check_compiled_client(client: Any, reference: CheckpointReference) -> None:
    """All layers at once stay in one graph; a prefetch leaves it, and still has the right rows."""
    ids = torch.stack([torch.arange(-2, 46).view(2, 24), torch.arange(60, 108).view(2, 24)], dim=1)
    expected = [reference.rows(layer, ids[:, i].numpy()).view(np.int16) for i, layer in enumerate(client.layers)]
    tables = [client.table(layer) for layer in client.layers]

    def together(ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = client.lookup_all(ids * 1, hashed=False)
        return rows.flatten(2)

    def ahead(ids: torch.Tensor) -> list[torch.Tensor]:
        begun = [table.prefetch(ids[:, i] * 1) for i, table in enumerate(tables)]
        other = ids.sum()
        return [torch.where(other > 0, pending.wait(), 0) for pending in begun]

    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        rows = torch.compile(together, fullgraph=True, backend=backend)(ids).view(2, 2, 24, 256)
        for i, wanted in enumerate(expected):
            assert np.array_equal(rows[:, i].view(torch.int16).numpy(), wanted)
        compiled = torch.compile(ahead, backend=backend)
        for _ in range(2):
            for found, wanted in zip(compiled(ids), expected, strict=True):
                assert np.array_equal(found.view(torch.int16).numpy(), wanted)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_looks_up_without_a_graph_break_on_gpu_and_cpu(host_table: Daemon, checkpoint: Path) -> None:
    run_ranks(1, quietly, host_table.endpoint, str(checkpoint))
    with connect(host_table.endpoint, rank=0, world_size=1) as client:
        check_compiled(client.table(14), CheckpointReference(checkpoint))
        check_compiled_client(client, CheckpointReference(checkpoint))


def quietly(rank: int, world_size: int, endpoint: str, checkpoint: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about itself
        compile_lookups(rank, world_size, endpoint, checkpoint)


# Attaches that fail


def fails(rank: int, world_size: int, endpoint: str, device: str, machine: dict[str, Any], fail: str) -> Any:
    """The error's class, what leaked, whether the GPU can be used afterwards."""
    on_fake(machine, fail)
    try:
        connect(endpoint, rank=0, world_size=1, device=device).close()
        outcome = "attached"
    except EngramError as error:
        outcome = error.code
    try:
        driver = cuda_driver()
        assert isinstance(driver, FakeDriver)
        with driver.context(0):
            driver.stream_destroy(driver.stream_create())
        return outcome, driver.leaks()
    except EngramError as error:
        return outcome, error.code


@pytest.mark.parametrize(
    ("device", "machine", "fail", "error"),
    [
        ("cuda:0", {"driver": False}, "", "NoDriver"),
        ("cuda:2", {"gpus": 2}, "", "GpuNotFound"),
        ("cuda:0", {"gpus": 2}, "cuLibraryLoadData:1:CUDA_ERROR_NO_BINARY_FOR_GPU", "CudaCallFailed"),
        ("cuda:0", {"gpus": 2}, "cuMemHostRegister:1:CUDA_ERROR_OUT_OF_MEMORY", "RegistrationFailed"),
        ("cuda:0", {"gpus": 2}, "cuMemHostRegister:2:CUDA_ERROR_OUT_OF_MEMORY", "RegistrationFailed"),
        ("cuda:1", {"gpus": 2}, "cuMemHostRegister:3:CUDA_ERROR_OUT_OF_MEMORY", "CudaCallFailed"),
        ("cuda:0", {"gpus": 2}, "", "attached"),
    ],
)
def test_an_attach_that_fails_says_why_and_leaves_the_gpu_usable(
    host_table: Daemon, device: str, machine: dict[str, Any], fail: str, error: str
) -> None:
    ((outcome, left),) = run_ranks(1, fails, host_table.endpoint, device, machine, fail)
    assert outcome == error
    if error == "NoDriver":
        assert left == "NoDriver"
    else:
        assert set(left) <= {f"1 of context {device[-1]}"}, "the kernels' own, which stay"
    wait_until(lambda: not host_table.status().leases, "the lease ends")


def test_a_torch_without_cuda_is_named(host_table: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    for name, value in (FAKE | {"ENGRAM_FAKE_CUDA": "{}"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("engram_client.cuda.access._driver", None)
    with pytest.raises(CudaUnavailable):
        connect(host_table.endpoint, rank=0, world_size=1, device="cuda:0")


def lonely(rank: int, world_size: int, endpoint: str) -> str:
    """A rank that sees its own GPU only."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    on_fake({"gpus": 2})
    with pytest.raises(PeerAccessMissing) as caught:
        connect(endpoint, rank=rank, world_size=world_size, device="cuda:0")
    return caught.value.reason


def test_a_shard_on_a_gpu_that_a_rank_does_not_see_is_refused_with_the_way_out(folder: Path, checkpoint: Path) -> None:
    with daemon_of(folder, checkpoint, {"placement": "gpu", "lookup": "peer_read"}, {"gpus": 2}) as daemon:
        assert all("CUDA_VISIBLE_DEVICES" in reason for reason in run_ranks(2, lonely, daemon.endpoint))
