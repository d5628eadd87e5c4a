"""Wrong use of an attached client."""

from __future__ import annotations

from engram_client.errors.base import EngramError


class UseError(EngramError):
    """Base of wrong use of an attached client."""


class ClientClosed(UseError):
    template = "{what} was used after close()"
    what: str


class ForkedClient(UseError):
    template = "this client was opened by pid {owner} before a fork; connect again in the child"
    owner: int


class IdsDtypeInvalid(UseError):
    template = "ids are {found}; int32 or int64 is needed"
    found: str


class IdsDeviceInvalid(UseError):
    template = "ids are on {found} and the client reads on {expected}"
    found: str
    expected: str


class IdsShapeInvalid(UseError):
    template = "ids have shape {found}; expected {expected}"
    found: str
    expected: str


class OutInvalid(UseError):
    template = "out is {found}; expected {expected}"
    found: str
    expected: str


class CompressedVocabularyInvalid(UseError):
    """The map from token ids to compressed ids is not the model's: every hash would be wrong."""

    template = "the compressed vocabulary {found}; expected {expected}: use the tokenizer of this model"
    found: str
    expected: str


class TokenInvalid(UseError):
    template = "token {token} at position {position} is not in the vocabulary of {vocab_size} tokens"
    token: int
    position: int
    vocab_size: int


class InvalidIds(UseError):
    """Strict mode: ids outside the table, or with hashed=True outside their column."""

    template = "{count} ids of layer {layer_id} name no row (first: {first} at position {position}); check the hasher"
    layer_id: int
    count: int
    first: int
    position: int


class GroupNeeded(UseError):
    template = (
        "peer_read over {nnodes} nodes exchanges handles between ranks when they attach, and torch.distributed is not "
        "initialised; call init_process_group before connect(), and pass group= where it is not WORLD"
    )
    nnodes: int


class GroupInvalid(UseError):
    template = "the process group has {found} ranks and this client is rank {rank} of {world_size}"
    found: int
    rank: int
    world_size: int


class GroupRankMismatch(UseError):
    """Shards are put together in the group's order, so the client's rank must be its rank in the group."""

    template = (
        "this process is rank {group_rank} of the process group and its client is rank {rank}; "
        "connect with the rank that it has in the group"
    )
    group_rank: int
    rank: int


class SplitReadsRefused(UseError):
    """Ranks can share out the reads of a table only where each has all of it, over a link worth sparing."""

    template = (
        "split_reads=True is for whole tables in host memory, and this daemon serves placement={placement} "
        "replication={replication}; drop split_reads, or configure placement cpu and replication per_node"
    )
    placement: str
    replication: str


class CountsInvalid(UseError):
    template = "counts {found} do not fit: expected {expected}"
    found: str
    expected: str
