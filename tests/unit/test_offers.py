"""What ranks of several nodes tell each other: whether their shards make up one table, and what nobody may see."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import NodesDiffer, RowsNotCovered
from engram_client.identity import TableIdentity
from engram_client.layout import RowFormat, TableGeometry, shard
from engram_client.nodes import check_cover, check_equal, check_offers, merged
from engram_client.protocol import (
    MAX_HANDOVER_BYTES,
    MAX_REPLY_BYTES,
    Attached,
    Backing,
    Exported,
    FabricHandle,
    Lookup,
    Offer,
    Placement,
    RankMessage,
    Replication,
    ResolvedOptions,
    SegmentInfo,
    TableInfo,
    decode,
    encode,
)

COLUMNS = tuple(range(101, 125))
HANDLE = b"secret-" * 9 + b"!"


def options(tp: int, nnodes: int, node: int, **changes: Any) -> ResolvedOptions:
    made = ResolvedOptions(
        placement=Placement.GPU,
        replication=Replication.NONE,
        lookup=Lookup.PEER_READ,
        tp_size=tp,
        nnodes=nnodes,
        node_rank=node,
    )
    return msgspec.structs.replace(made, **changes)


def segment(geometry: TableGeometry, rank: int, tp: int) -> SegmentInfo:
    return SegmentInfo(
        id=f"L{geometry.layer_id}.r{rank}of{tp}",
        layer_id=geometry.layer_id,
        shard=shard(geometry, rank, tp),
        rank=rank,
        nbytes=2 << 20,
        backing=Backing.CUDA_DEVICE,
        row_format=RowFormat.PLANAR,
        page_bytes=2 << 20,
        device=f"GPU-{rank}",
    )


def table(layer: int, ranks: range, tp: int, columns: tuple[int, ...] = COLUMNS) -> TableInfo:
    geometry = TableGeometry(layer_id=layer, columns=columns)
    return TableInfo(
        geometry=geometry,
        identity=TableIdentity.of(geometry, None),
        segments=tuple(segment(geometry, rank, tp) for rank in ranks),
        sample="5a" * 16,
    )


def offers_of(tp: int, nnodes: int, columns: tuple[int, ...] = COLUMNS) -> list[Offer]:
    return [
        Offer(
            rank=rank,
            options=options(tp, nnodes, rank // (tp // nnodes)),
            tables=tuple(table(layer, range(rank, rank + 1), tp, columns) for layer in (1, 14)),
            handles=(FabricHandle(segment=f"L1.r{rank}of{tp}", handle=HANDLE),),
        )
        for rank in range(tp)
    ]


def test_ranks_that_would_split_reads_of_other_batches_are_refused() -> None:
    """One on a CPU and one on a GPU: each would wait in exchanges that the other leaves out."""
    one, other = offers_of(2, 1)
    check_equal([one, other])
    one, other = (msgspec.structs.replace(offer, splits_from=ids) for offer, ids in ((one, 1), (other, 1024)))
    with pytest.raises(NodesDiffer) as caught:
        check_equal([one, other])
    assert caught.value.differing == ["splits_from"]


@given(
    st.integers(1, 4),
    st.integers(2, 6),
    st.lists(st.integers(1, 9), min_size=1, max_size=30).map(tuple),
)
def test_shards_of_any_split_make_up_the_table_and_one_too_few_or_too_many_does_not(
    per_node: int, nnodes: int, columns: tuple[int, ...]
) -> None:
    tp = per_node * nnodes
    offers = offers_of(tp, nnodes, columns)
    check_offers(offers)
    geometry = offers[0].tables[0].geometry
    segments = [offer.tables[0].segments[0] for offer in offers]
    check_cover(geometry, segments[::-1])
    for index, one in enumerate(segments):
        if not one.shard.rows:
            continue
        for wrong in (segments[:index] + segments[index + 1 :], [*segments, msgspec.structs.replace(one, id="again")]):
            with pytest.raises(RowsNotCovered):
                check_cover(geometry, wrong)
    with pytest.raises(RowsNotCovered):
        check_cover(geometry, [])


@given(st.integers(1, 3), st.integers(2, 4))
def test_a_rank_gets_its_own_nodes_segments_from_its_daemon_and_the_others_from_their_ranks(
    per_node: int, nnodes: int
) -> None:
    tp = per_node * nnodes
    offers = offers_of(tp, nnodes)
    for node in range(nnodes):
        ranks = range(node * per_node, (node + 1) * per_node)
        attached = Attached(
            epoch="e",
            options=options(tp, nnodes, node),
            tables=tuple(table(layer, ranks, tp) for layer in (1, 14)),
            ticket=b"t",
        )
        for found in merged(attached, offers):
            ids = [one.id for one in found.segments]
            assert len(ids) == len(set(ids)) == tp
            check_cover(found.geometry, found.segments)


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"options": options(4, 2, 1, lookup=Lookup.COLLECTIVE)}, ["lookup"]),
        ({"options": options(8, 4, 1)}, ["tp_size", "nnodes"]),
        ({"tables": (table(1, range(3, 4), 4),)}, ["layers"]),
        (
            {"tables": (table(1, range(3, 4), 4, (5, 6)), table(14, range(3, 4), 4))},
            ["layer 1 rows", "layer 1 columns"],
        ),
    ],
)
def test_what_differs_is_named_with_both_sides(change: dict[str, Any], differing: list[str]) -> None:
    offers = offers_of(4, 2)
    offers[3] = msgspec.structs.replace(offers[3], **change)
    with pytest.raises(NodesDiffer) as refused:
        check_offers(offers)
    error = refused.value
    assert error.differing[: len(differing)] == differing
    assert (error.rank, error.other_rank, error.other_node) == (0, 3, 1)
    for name in differing:
        assert error.found[name] != error.other_found[name]


def test_proofs_count_where_both_sides_have_them() -> None:
    offers = offers_of(2, 2)
    first, second = offers[1].tables
    known = msgspec.structs.replace(first, identity=msgspec.structs.replace(first.identity, root="ab" * 16))
    check_offers([offers[0], msgspec.structs.replace(offers[1], tables=(known, second))])
    other = msgspec.structs.replace(first, sample="00" * 16)
    with pytest.raises(NodesDiffer) as refused:
        check_offers([offers[0], msgspec.structs.replace(offers[1], tables=(other, second))])
    assert refused.value.differing == ["layer 1 sample"]


def test_an_offer_travels_whole_and_no_text_of_it_shows_a_handle() -> None:
    offer = offers_of(4, 2)[2]
    assert decode(encode(offer), RankMessage) == (0, offer)
    exported = Exported(handles=offer.handles)
    assert len(encode(exported)) < MAX_HANDOVER_BYTES < MAX_REPLY_BYTES
    for shown in (repr(offer), str(exported), f"{offer.handles}", repr(offer.handles[0].__rich_repr__())):
        assert "secret-" not in shown.replace("<secret>", "")
        assert "L1.r2of4" in shown
    assert pickle.loads(pickle.dumps(offer)).handles[0].handle == HANDLE
