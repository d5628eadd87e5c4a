"""What stands behind the hooked methods of SGLang's EngramEmbedding: storage and lookup of one layer.

Imported by the plugin inside SGLang only: needs torch and sglang. The instance stays SGLang's own class, so that
everything which asks for its type or its attributes finds them; what is ours hangs on it as `engram_table`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from engram_client import sglang as plugin
from engram_client.api import Table
from engram_client.errors import (
    CheckpointDiffers,
    EngramError,
    GroupUndecided,
    LayerGeometryMismatch,
    WrongShape,
)
from engram_client.layout import ROW_SCALES, ROW_VALUES, TableGeometry, shard
from engram_client.protocol import Lookup, Replication
from engram_client.sglang_attach import LINE, Place, Settings, client_of_process

logger = logging.getLogger(__name__)

ATTRIBUTE = "engram_table"
PROOF_ROWS = 256
"""Rows compared with the engine's checkpoint. A table with one row in a hundred wrong passes 1 time in 13."""


class Hook(Protocol):
    def __call__(
        self, original: Callable[..., Any], embedding: nn.Module, /, *arguments: Any, **options: Any
    ) -> Any: ...


def build(
    original: Callable[..., Any],
    embedding: nn.Module,
    num_embeddings: int,
    dim: int,
    layer_id: int,
    column_bounds: tuple[int, ...],
) -> None:
    """`EngramEmbedding.__init__`: attaches and checks, so that a fallback is known before weights load."""
    missing = plugin.unhooked(type(embedding))
    if missing:
        raise plugin.incompatible(f"SGLang did not apply the plugin's hooks on {', '.join(missing)}")
    error: EngramError | None = None
    served: ServedTable | None = None
    try:
        served = attach(num_embeddings, dim, layer_id, column_bounds)
    except EngramError as failure:
        error = failure
    if not plugin.required():
        error = agree(error)
    if error is None and served is not None:
        furnish(embedding, served, dim)
        return
    if error is not None and plugin.required():
        raise error
    logger.warning(
        "%s layer %d runs on SGLang's own table, as %s=0 allows: %s", LINE, layer_id, plugin.REQUIRED_VARIABLE, error
    )
    original(embedding, num_embeddings, dim, layer_id, column_bounds)


def forward(
    original: Callable[..., Any],
    embedding: nn.Module,
    indices: Tensor,
    forward_batch: Any = None,
    *,
    cp_all_tokens: bool = False,
) -> Tensor:
    """`EngramEmbedding.forward`: bfloat16 `[*indices.shape, 256]`."""
    served: ServedTable | None = embedding.__dict__.get(ATTRIBUTE)
    if served is None:
        own: Tensor = original(embedding, indices, forward_batch, cp_all_tokens=cp_all_tokens)
        return own
    return served.lookup(indices, cp_all_tokens)


def finish_load(original: Callable[..., Any], embedding: nn.Module, label: str) -> None:
    """`EngramEmbedding.finish_load`: after every load and update of weights, on all ranks."""
    served: ServedTable | None = embedding.__dict__.get(ATTRIBUTE)
    if served is None:
        original(embedding, label)
    else:
        served.prove(label)


def attach(num_embeddings: int, dim: int, layer_id: int, column_bounds: Sequence[int]) -> ServedTable:
    """The daemon's table of this layer, checked against the model's geometry. Raises EngramError."""
    parallel = get_parallel()
    place = Place(parallel.tp_rank, parallel.tp_size, lookup_device())
    group = None
    if place.world_size > 1:
        group = parallel.tp_group.cpu_group if place.device == "cpu" else parallel.tp_group.device_group
    settings = Settings.from_environment()
    client = client_of_process(settings, place, group, remember_failure=not plugin.required())
    table = client.table(layer_id)
    columns = tuple(np.diff(column_bounds).tolist())
    if (dim, num_embeddings, columns) != (ROW_VALUES, table.rows, table.columns):
        raise LayerGeometryMismatch(
            layer_id=layer_id,
            model_rows=num_embeddings,
            model_columns=len(columns),
            served_rows=table.rows,
            served_columns=len(table.columns),
        )
    options = client.options
    alone = place.world_size == 1 or options.replication == Replication.PER_NODE or options.lookup == Lookup.PEER_READ
    return ServedTable(table, place, assembled=not alone, split=settings.split_reads)


def lookup_device() -> str:
    """Where SGLang builds this model: the device that tensors made here get."""
    device = torch.get_default_device()
    if device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available()):
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    return "cpu"


def agree(error: EngramError | None) -> EngramError | None:
    """All ranks of the group attach, or all fall back: half a group would wait for ever for the other half."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return error
    failed = torch.tensor([int(error is not None)], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(failed, group=parallel.tp_group.cpu_group)
    if error is None and failed.item():
        return GroupUndecided(failed=int(failed.item()), ranks=parallel.tp_size)
    return error


def furnish(embedding: nn.Module, served: ServedTable, dim: int) -> None:
    """Gives an embedding without a table the attributes that SGLang's own has.

    `weight` and `scale` have no rows and so no memory, which SGLang knows from ranks with an empty shard; what
    walks over parameters (sleep and wake, weight updates, checks, dummy weights) finds nothing to move.
    """
    nn.Module.__init__(embedding)
    geometry = TableGeometry(layer_id=served.table.layer_id, columns=served.table.columns)
    part = shard(geometry, served.place.rank, served.place.world_size)
    embedding.__dict__.update(
        {
            ATTRIBUTE: served,
            "dim": dim,
            "tp_size": served.place.world_size,
            "row_start": part.row_start,
            "rows": part.rows,
            "host_table": None,
            "staged_by_scheduler": False,
            "peer": None,
            "_sort_host_reads": False,
        }
    )
    values = torch.empty(0, dim, dtype=torch.float8_e4m3fn)
    scales = torch.empty(0, dim // (ROW_VALUES // ROW_SCALES), dtype=torch.float8_e8m0fnu)
    for name, empty, loader in (("weight", values, served.see_values), ("scale", scales, served.see_scales)):
        parameter = nn.Parameter(empty, requires_grad=False)
        parameter.weight_loader = loader  # type: ignore[attr-defined]
        embedding.register_parameter(name, parameter)


class ServedTable:
    """One layer's table in the daemon, and the rows of the engine's checkpoint that it must agree with."""

    def __init__(self, table: Table, place: Place, *, assembled: bool, split: bool) -> None:
        """assembled: rows come together by a collective of the group, so that it matters whose tokens they are.
        split: so do those of larger batches, where all ranks have the same tokens."""
        self.table = table
        self.place = place
        self._assembled = assembled
        self._split = split
        self._columns = len(table.columns)
        self._proof_ids = proof_ids(table.layer_id, table.rows)
        self._seen: dict[str, Tensor] = {}
        self._proven = False
        self._warned = False

    def __repr__(self) -> str:
        return f"<served {self.table!r}, {'proven' if self._proven else 'not proven'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedTable:
        return self  # copies of a model read the same table

    def see_values(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        """The weight loader of `weight`: takes the rows for the proof, in a mapped file only their pages."""
        self._see("weight", loaded, ROW_VALUES)

    def see_scales(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        self._see("scale", loaded, ROW_SCALES)

    def _see(self, name: str, loaded: Tensor, width: int) -> None:
        expected = [self.table.rows, width]
        if list(loaded.shape) != expected:
            raise WrongShape(
                tensor=f"layers.{self.table.layer_id}.engram.embed.{name}",
                path="the engine's weights",
                expected=str(expected),
                found=str(list(loaded.shape)),
            )
        picked = loaded.detach().view(torch.uint8)[self._proof_ids.to(loaded.device)]
        self._seen[name] = picked.to("cpu")

    def prove(self, label: str) -> None:
        """Compares what the engine has just loaded with what the daemon serves, byte for byte; a collective where
        lookups are.

        Raises CheckpointDiffers.
        """
        if not {"weight", "scale"} <= self._seen.keys():
            self._warn_unproven(label)
            return
        loaded = torch.cat([self._seen.pop("weight"), self._seen.pop("scale")], dim=1)
        ids = self._proof_ids.to(self.place.device)
        served = self.table.lookup(ids, raw=True)
        wrong = (torch.cat([served.values, served.scales], dim=1).to("cpu") != loaded).any(dim=1).nonzero().flatten()
        if len(wrong):
            raise CheckpointDiffers(
                layer_id=self.table.layer_id,
                compared=len(ids),
                differing=len(wrong),
                first_row=int(self._proof_ids[wrong[0]]),
            )
        self._proven = True
        logger.info("%s %s: %d rows compared with the engine's checkpoint, all equal", LINE, label, len(ids))

    def lookup(self, ids: Tensor, cp_all_tokens: bool) -> Tensor:
        """Rows of `ids`, whose strides do not matter. Where shards are assembled, every rank comes here."""
        if not self._proven:
            self._warn_unproven(f"layer {self.table.layer_id}")
        hashed = ids.dim() > 0 and ids.shape[-1] == self._columns
        if not self._assembled:
            # With a target of known layout a GPU lookup does not check again what it has checked before.
            out = torch.empty(*ids.shape, ROW_VALUES, dtype=torch.bfloat16, device=ids.device)
            own = self._split and (cp_all_tokens or get_parallel().attn_dp_size > 1)
            return self.table.lookup(ids, out, hashed=hashed, tokens="own" if own else "same")
        parallel = get_parallel()
        if cp_all_tokens:
            # Context parallel prefill pads all ranks to one length.
            return self.table.lookup(ids, hashed=hashed, tokens="own", counts=[ids.shape[0]] * self.place.world_size)
        if parallel.attn_dp_size > 1:
            return self._lookup_own(ids, hashed, parallel.attn_dp_size)
        return self.table.lookup(ids, hashed=hashed)

    def _lookup_own(self, ids: Tensor, hashed: bool, attn_dp_size: int) -> Tensor:
        """Attention DP: every DP rank has its own batch, idle ones included, and the ranks inside it share it.

        All ranks know the lengths that the batches were padded to; rows beyond, which a graph may add, are zero.
        """
        lengths = get_dp_global_num_tokens()
        if lengths is None:
            return self.table.lookup(ids, hashed=hashed, tokens="own")
        ranks_each = self.place.world_size // attn_dp_size
        counts = [int(length) for length in lengths for _ in range(ranks_each)]
        mine = counts[self.place.rank]
        if mine == ids.shape[0]:
            return self.table.lookup(ids, hashed=hashed, tokens="own", counts=counts)
        out = torch.zeros(*ids.shape, ROW_VALUES, dtype=torch.bfloat16, device=ids.device)
        self.table.lookup(ids[:mine], out[:mine], hashed=hashed, tokens="own", counts=counts)
        return out

    def _warn_unproven(self, label: str) -> None:
        if not self._warned and not self._proven:
            self._warned = True
            logger.warning(
                "%s %s: the engine loaded no table of its checkpoint (dummy or partial weights), so its rows were not "
                "compared with the daemon's",
                LINE,
                label,
            )


def proof_ids(layer_id: int, row_count: int) -> Tensor:
    """The rows compared, int64 ascending: the first, the last and seeded ones between; equal on all ranks."""
    if row_count <= PROOF_ROWS:
        return torch.arange(row_count, device="cpu")
    between = np.random.default_rng([layer_id, row_count]).choice(row_count - 2, PROOF_ROWS - 2, replace=False) + 1
    return torch.from_numpy(np.sort(np.concatenate([[0], between, [row_count - 1]])))
