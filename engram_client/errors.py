"""Every failure that a user can meet, one class each, with typed fields instead of prose.

A class states three things in `template`: what happened, what was expected, what to do. The daemon sends an
error as its class name and fields; the client rebuilds the same class from them (`to_wire`, `from_wire`).
`exit_code` is what `engram-server` and `engram-ctl` end with when the error ends them.
"""

from __future__ import annotations

import functools
import typing
from typing import Any, ClassVar, dataclass_transform

import msgspec

EXIT_OK = 0
EXIT_OTHER = 1
EXIT_CONFIG = 2
EXIT_RESOURCES = 3
EXIT_CHECKPOINT = 4
EXIT_ALREADY_RUNNING = 5

BY_CODE: dict[str, type[EngramError]] = {}


@dataclass_transform(kw_only_default=True, eq_default=False)
class EngramError(Exception):
    """The root of all errors of this project."""

    template: ClassVar[str] = ""
    exit_code: ClassVar[int] = EXIT_OTHER

    field_types: ClassVar[dict[str, str]] = {}
    """The class's fields, those of its bases first, with their types as written."""

    def __init_subclass__(cls) -> None:
        # A hundred generated dataclasses would cost every start of the daemon and of a rank 15 ms.
        cls.field_types = cls.field_types | cls.__annotations__
        BY_CODE[cls.__name__] = cls

    def __init__(self, **fields: Any) -> None:
        """Takes every field of the class by name. Raises TypeError for one too many or too few."""
        if fields.keys() != self.field_types.keys():
            wrong = sorted(fields.keys() ^ self.field_types.keys())
            raise TypeError(f"{self.code} takes the fields {list(self.field_types)}; wrong: {wrong}")
        super().__init__()
        self.__dict__.update(fields)

    @property
    def code(self) -> str:
        """The name the error has on the wire: its class's name."""
        return type(self).__name__

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.field_types}

    def __str__(self) -> str:
        return self.template.format(**self.fields)

    def __repr__(self) -> str:
        return f"{self.code}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[EngramError], fields: dict[str, Any]) -> EngramError:
    return kind(**fields)


def to_wire(error: EngramError) -> tuple[str, dict[str, Any]]:
    """The error as a code and a map of fields that any msgpack reader understands."""
    return error.code, msgspec.to_builtins(error.fields, enc_hook=str)


def from_wire(code: str, fields: dict[str, Any]) -> EngramError:
    """The error that `to_wire` took apart; `UnknownError` when this version does not know the code, or
    knows it with other fields or types."""
    kind = BY_CODE.get(code)
    if kind is not None and kind.template:  # a class without one is a base, which nobody raises
        try:
            checked = msgspec.convert(fields, _shape(code), strict=True)
            return kind(**msgspec.structs.asdict(checked))
        except msgspec.ValidationError:
            pass
    return UnknownError(remote_code=code, remote_fields=fields)


@functools.cache
def _shape(code: str) -> type[msgspec.Struct]:
    """The fields of an error and their types as a struct, to check what came over the wire."""
    kind = BY_CODE[code]
    hints = typing.get_type_hints(kind)
    fields = [(name, hints[name]) for name in kind.field_types]
    return msgspec.defstruct(code, fields, forbid_unknown_fields=True)


class UnknownError(EngramError):
    """The daemon reported a failure that this version of the client does not know."""

    template = "the daemon reported {remote_code} {remote_fields}; this client does not know it: update the client"
    remote_code: str
    remote_fields: dict[str, Any]


class InternalError(EngramError):
    """A fault of ours: one request failed, the daemon goes on."""

    template = "internal error while {doing}: {problem}; this is a bug, please report it with the daemon's log"
    doing: str
    problem: str


# Configuration: exit code 2


class ConfigError(EngramError):
    """Base of what is wrong with a configuration."""

    exit_code = EXIT_CONFIG


class ConfigUnreadable(ConfigError):
    template = "cannot read the configuration {path}: {problem}; check the path and its permissions"
    path: str
    problem: str


class ConfigNotJson(ConfigError):
    template = "{where} is not JSON: {problem} (line {line}, column {column})"
    where: str
    problem: str
    line: int
    column: int


class ConfigInvalid(ConfigError):
    """A key is unknown, or its value has the wrong type or is not allowed."""

    template = "{where}: {path} {problem}; allowed: {allowed}"
    where: str
    path: str
    problem: str
    allowed: str


class ConfigContradiction(ConfigError):
    """Each value is allowed, their combination is not."""

    template = "{keys} contradict each other: {reason}; {remedy}"
    keys: str
    reason: str
    remedy: str


class NoGpu(ConfigError):
    template = (
        'placement "gpu" needs a GPU and this machine has none ({problem}); '
        'to serve the tables from host memory set "engram_config": {{"placement": "cpu"}}'
    )
    problem: str


class GpuNotFound(ConfigError):
    template = "no GPU {device} here; this process sees {present}: check CUDA_VISIBLE_DEVICES and the container's GPUs"
    device: str
    present: list[str]


class TooFewGpus(ConfigError):
    template = (
        "this node holds {ranks} ranks and has {gpus} GPUs to put their shards on; lower tp_size, raise nnodes, "
        'or set "placement": "cpu"'
    )
    ranks: int
    gpus: int


class Unsupported(ConfigError):
    """The configuration is sound, but this version of the daemon cannot do it."""

    template = "{feature} is not supported by this version: {reason}; {remedy}"
    feature: str
    reason: str
    remedy: str


class SocketPathInvalid(ConfigError):
    template = "socket path {path!r}: {problem}; use an absolute path of at most {limit} bytes"
    path: str
    problem: str
    limit: int


# Resources: exit code 3


class ResourceError(EngramError):
    """Base of what the machine does not have enough of."""

    exit_code = EXIT_RESOURCES


class NotEnoughMemory(ResourceError):
    template = (
        "the tables need {needed} bytes of host memory, {available} are available ({source}); free memory, raise "
        'the limit, or set host.memory_check to "warn" where the machine grows its memory on demand'
    )
    needed: int
    available: int
    source: str


class NotEnoughSpace(ResourceError):
    """A memory file system (/dev/shm, tmpfs, hugetlbfs) is too small or too full."""

    template = (
        "{path} has {available} bytes free and the tables need {needed}; enlarge it (for a container: its shm size "
        'or a memory emptyDir), empty it, or set host.backing to "memfd"'
    )
    path: str
    needed: int
    available: int


class NotEnoughHugePages(ResourceError):
    template = (
        "{needed} bytes of huge pages are needed and {available} are free; raise vm.nr_hugepages, "
        'or set host.huge_pages to "auto"'
    )
    needed: int
    available: int


class NotEnoughGpuMemory(ResourceError):
    """`needed` and `free` are bytes, in the order of `gpus`."""

    template = (
        "GPUs {gpus} are short of memory: needed {needed} bytes, free {free}; end what else uses them, split over more "
        'GPUs, or set "placement": "cpu"'
    )
    gpus: list[str]
    needed: list[int]
    free: list[int]


class PeerAccessMissing(ResourceError):
    template = (
        "GPU {device} cannot read GPU {peer}'s memory ({reason}); use GPUs that are linked (nvidia-smi topo -p2p r), "
        'or set "lookup": "collective"'
    )
    device: str
    peer: str
    reason: str


class BackingUnavailable(ResourceError):
    template = "backing {backing} cannot be used here: {problem}; {remedy}"
    backing: str
    problem: str
    remedy: str


class AllocationFailed(ResourceError):
    """Memory that the plan had found free could not be had when it was touched."""

    template = (
        "allocating {needed} bytes of {backing} memory failed: {problem}; "
        "something else took the memory meanwhile, or a limit is lower than it looks"
    )
    backing: str
    needed: int
    problem: str


class LoaderDied(ResourceError):
    """The loader child ended without a word; it is the first that a short machine kills."""

    template = "the loader was ended by {how} while {doing}; if by SIGKILL, the machine ran short of memory (see dmesg)"
    how: str
    doing: str


class TooFewDescriptors(ResourceError):
    template = (
        "this process may have {limit} files open and needs room for {needed}: raise its limit (ulimit -n, "
        "LimitNOFILE= of a systemd unit), or close some"
    )
    limit: int
    needed: int


class WriteFailed(ResourceError):
    template = "writing {path} failed: {problem}; nothing was left behind, check the disk's space and permissions"
    path: str
    problem: str


class SocketUnavailable(ResourceError):
    template = "cannot make the socket {path}: {problem}; check that the folder can be written and is on a local disk"
    path: str
    problem: str


class MetricsUnavailable(ResourceError):
    template = "cannot serve metrics on {listen}: {problem}; give metrics.listen a free port of this host, or null"
    listen: str
    problem: str


# Checkpoint: exit code 4


class CheckpointError(EngramError):
    """Base of what is wrong with a checkpoint."""

    exit_code = EXIT_CHECKPOINT


class CheckpointNotFound(CheckpointError):
    template = "{path}: {problem}; model_path is the folder with config.json and the safetensors files"
    path: str
    problem: str


class CheckpointConfigInvalid(CheckpointError):
    template = "{path}: {problem}; expected the config.json of a DeepSeek-V4.1 checkpoint"
    path: str
    problem: str


class NoEngramLayers(CheckpointError):
    template = "{path} (model_type {model_type}) has no Engram layers; a DeepSeek-V4.1 checkpoint is needed"
    path: str
    model_type: str


class IndexInvalid(CheckpointError):
    template = "{path}: {problem}; the index is damaged, copy it again"
    path: str
    problem: str


class MissingTensor(CheckpointError):
    template = "tensor {tensor} is not in {path}; the checkpoint is incomplete"
    tensor: str
    path: str


class AmbiguousTensor(CheckpointError):
    template = "{path} holds both {first} and {second}; which one is the table cannot be known: remove one"
    path: str
    first: str
    second: str


class MissingFile(CheckpointError):
    template = "{path} is missing and holds {tensor}; the download is incomplete"
    path: str
    tensor: str


class DanglingSymlink(CheckpointError):
    template = "{path} is a symlink to {target}, which does not exist; the snapshot is incomplete, fetch it again"
    path: str
    target: str


class HeaderInvalid(CheckpointError):
    template = "{path} has no valid safetensors header: {problem}; the file is damaged, copy it again"
    path: str
    problem: str


class TruncatedFile(CheckpointError):
    template = "{path} ends at byte {size} and its header promises {expected}; the copy was cut, copy it again"
    path: str
    size: int
    expected: int


class OverlappingTensors(CheckpointError):
    template = "{path}: {first} and {second} claim the same bytes; the file is damaged, copy it again"
    path: str
    first: str
    second: str


class WrongDtype(CheckpointError):
    template = "{tensor} in {path} is {found}, expected {expected}; this is not an FP8 Engram table"
    tensor: str
    path: str
    expected: str
    found: str


class WrongShape(CheckpointError):
    template = "{tensor} in {path} has shape {found}, expected {expected}"
    tensor: str
    path: str
    expected: str
    found: str


class RowCountMismatch(CheckpointError):
    template = "{where} is {found}, and the prime layout of this configuration gives {expected} rows"
    where: str
    expected: int
    found: int


class FolderNotEmpty(CheckpointError):
    """A made checkpoint is written into a new or an empty folder only."""

    template = "{path} is not empty (it holds {example!r}); name a new folder, or empty this one"
    path: str
    example: str


class ReadFailed(CheckpointError):
    template = "reading {path} at byte {offset} failed: {problem}; check the disk or file system, then start again"
    path: str
    offset: int
    problem: str


class DigestMismatch(CheckpointError):
    """Memory does not hold what was read into it."""

    template = (
        "segment {segment}, rows {row_start} to {row_stop}: digest {found}, expected {expected}; "
        "the memory was changed or is faulty: restart the daemon to load again, and check the machine's ECC log"
    )
    segment: str
    row_start: int
    row_stop: int
    expected: str
    found: str


# Adopting what an earlier daemon left: never ends a daemon, which loads instead


class AdoptError(EngramError):
    """Base of why tables in memory are not taken over by a restarted daemon."""


class ManifestInvalid(AdoptError):
    template = "the manifest in {where} cannot be used: {problem}; the tables are loaded again"
    where: str
    problem: str


class ManifestVersionUnknown(AdoptError):
    template = (
        "the manifest in {where} has version {found} and this daemon knows {known}: a newer daemon wrote it; "
        "the tables are loaded again"
    )
    where: str
    found: int
    known: int


class AdoptionRefused(AdoptError):
    template = "{what} in memory is not taken over: {reason}; it is loaded again"
    what: str
    reason: str


# Another daemon: exit code 5


class AlreadyRunning(EngramError):
    template = "a daemon (pid {pid}) already serves {endpoint}; stop it first, or give this one another endpoint"
    exit_code = EXIT_ALREADY_RUNNING
    endpoint: str
    pid: int


# Connecting and attaching


class ConnectError(EngramError):
    """Base of what can go wrong between a client and the daemon."""


class NoServer(ConnectError):
    template = "nothing is at {path}: no daemon was started there, or the socket folder is not mounted here"
    path: str


class ServerRefused(ConnectError):
    template = "{path} is there but nobody listens: the daemon died or is not up yet; start engram-server"
    path: str


class AccessDenied(ConnectError):
    template = (
        "uid {uid} may not use {path}: {problem}; run as the daemon's user, or add the uid to control.uids "
        "(or the gid to control.gids) and widen control.mode"
    )
    path: str
    uid: int
    problem: str


class ProtocolMismatch(ConnectError):
    template = "the client speaks protocol {client} and the daemon {server}; update the older of the two"
    client: int
    server: int


class ConnectTimeout(ConnectError):
    template = "no answer within {timeout_s} s while {doing}; last cause: {cause}"
    timeout_s: float
    doing: str
    cause: str


class TransferCut(ConnectError):
    template = "the connection ended while {doing}; the daemon stopped or crashed: see its log, then attach again"
    doing: str


class Evicted(ConnectError):
    template = (
        "lease {lease} was ended by engram-ctl evict; the mapped tables stay readable, attach again for a new lease"
    )
    lease: int


class ServerDraining(ConnectError):
    template = "the daemon is shutting down and takes no new clients; wait for the next one"


class LoadFailed(ConnectError):
    """The daemon could not load its tables; `cause` is its own error as a sentence."""

    template = "the daemon could not load its tables: {cause_code}: {cause}"
    cause_code: str
    cause: str


class IdentityMismatch(ConnectError):
    template = "layer {layer_id} is not the table demanded: {differing} differ (demanded {demanded}, served {served})"
    layer_id: int
    differing: list[str]
    demanded: dict[str, Any]
    served: dict[str, Any]


class TpSizeMismatch(ConnectError):
    template = (
        "the client's world_size is {client} and the daemon splits its tables over tp_size {server}; "
        'start them with equal sizes, or use "replication": "per_node", which any world_size may attach'
    )
    client: int
    server: int


class RankInvalid(ConnectError):
    template = "rank {rank} is not in [0, {world_size})"
    rank: int
    world_size: int


class RankOnOtherNode(ConnectError):
    template = (
        "rank {rank} is not of this node: the daemon is node_rank {node_rank} and holds the shards of ranks {held}; "
        "connect to the daemon of the rank's own node, or correct its node_rank"
    )
    rank: int
    node_rank: int
    held: list[int]


class UnknownLayer(ConnectError):
    template = "layer {layer_id} has no table here; the daemon serves layers {served}"
    layer_id: int
    served: list[int]


class TicketInvalid(ConnectError):
    template = "the ticket is unknown, used or expired; attach again"


class TooManyClients(ConnectError):
    template = "the daemon already has {limit} {what}; detach some clients"
    what: str
    limit: int


class TableDamaged(ConnectError):
    """A check found rows that are not those that were loaded. Ranks that are attached are not told: see status."""

    template = (
        "the table of layer {layer_id} is damaged in memory (segment {segment}); restart the daemon: it loads that "
        "table again"
    )
    layer_id: int
    segment: str


class NotPermitted(ConnectError):
    template = "{request} is for the daemon's own user (uid {owner}) or root: {problem}"
    request: str
    owner: int
    problem: str


class UnknownLease(ConnectError):
    template = "there is no lease {lease}; the leases held are {held}"
    lease: int
    held: list[int]


class FabricUnavailable(ConnectError):
    """A node cannot hand its shards to ranks of other nodes. Raised on all ranks of the group, wherever it is."""

    template = "peer_read across nodes needs FABRIC handles, and node {node_rank} has none: {problem}; {remedy}"
    node_rank: int
    problem: str
    remedy: str


class NodesDiffer(ConnectError):
    """Two ranks of a group are attached to daemons whose shards do not make up one table. Raised on all ranks."""

    template = (
        "the daemons of ranks {rank} and {other_rank} (nodes {node} and {other_node}) do not serve parts of the same "
        "tables: {differing} differ: {found} and {other_found}; start all nodes with the same engram.json but for "
        "node_rank, and the same checkpoint"
    )
    rank: int
    node: int
    other_rank: int
    other_node: int
    differing: list[str]
    found: dict[str, Any]
    other_found: dict[str, Any]


class RowsNotCovered(ConnectError):
    template = (
        "the shards that the ranks hold do not make up the table of layer {layer_id}: {problem}; start all nodes with "
        "the same tp_size and nnodes, and each with its own node_rank"
    )
    layer_id: int
    problem: str


class OtherRankFailed(ConnectError):
    """Ranks of several nodes attach together or not at all."""

    template = "rank {rank} could not attach, so no rank does: {cause_code}: {cause}"
    rank: int
    cause_code: str
    cause: str


class ExchangeFailed(ConnectError):
    template = (
        "the ranks of the group could not tell each other what they hold: {problem}; a rank has died, could not reach "
        "its daemon, or did not come within the group's timeout: see the other ranks' logs"
    )
    problem: str


class DeviceUnsupported(ConnectError):
    template = 'lookups on device {device!r} are not supported; use device "cpu" or "cuda:N"'
    device: str


class MapFailed(ConnectError):
    template = "mapping segment {segment} ({nbytes} bytes) failed: {problem}"
    segment: str
    nbytes: int
    problem: str


# Messages


class MessageError(EngramError):
    """Base of what is wrong with a message."""


class MalformedMessage(MessageError):
    template = "the message cannot be read: {problem}"
    problem: str


class UnknownMessage(MessageError):
    template = "no message is called {name!r}"
    name: str


class FrameTooLarge(MessageError):
    template = "a message of {size} bytes exceeds the limit of {limit}"
    size: int
    limit: int


class NotAllowedNow(MessageError):
    template = "{request} is not possible while the daemon is {state}"
    request: str
    state: str


# Using a table


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


class CountsInvalid(UseError):
    template = "counts {found} do not fit: expected {expected}"
    found: str
    expected: str


# CUDA


class CudaError(EngramError):
    """Base of what goes wrong between a rank and CUDA."""


class CudaUnavailable(CudaError):
    """CUDA is not there at all, or not a version that can be used."""

    template = "CUDA cannot be used here: {problem}; {remedy}"
    problem: str
    remedy: str


class CudaCallFailed(CudaError):
    """A driver call failed; `name` is the driver's own name of the code."""

    template = "{call} failed with {name} ({meaning}); {remedy}"
    call: str
    name: str
    meaning: str
    remedy: str


class KernelCompileFailed(CudaError):
    template = "NVRTC {nvrtc} cannot compile the kernels for {arch}: {log}; {remedy}"
    nvrtc: str
    arch: str
    log: str
    remedy: str


class NoDriver(CudaError):
    """No driver, or one that finds no GPU."""

    template = (
        "there is no usable CUDA driver here: {problem}; install the NVIDIA driver, or run the container with GPUs"
    )
    problem: str


class RegistrationFailed(CudaError):
    """Host memory could not be made readable for the GPU. Nothing of the segment stayed registered."""

    template = (
        "registering bytes {start} to {stop} of segment {segment} for GPU {device} failed with {name}; all of it was "
        "undone: {remedy}"
    )
    segment: str
    device: int
    start: int
    stop: int
    name: str
    remedy: str


class AddressesScattered(CudaError):
    """The driver gave registered ranges addresses that are not contiguous: rows across a border would be wrong."""

    template = (
        "segment {segment} is at {expected:#x} for GPU {device} and its byte {offset} at {found:#x}, out of line; "
        'update the driver, or set host.backing to "cuda_host"'
    )
    segment: str
    device: int
    offset: int
    expected: int
    found: int


# In an engine


class EngineError(EngramError):
    """Base of what keeps an engine's Engram layers from reading the daemon's tables."""


class IncompatibleSGLang(EngineError):
    """SGLang does not have the names that the plugin hooks, or has them with other signatures."""

    template = (
        "SGLang {found} cannot use the Engram table server: {problem}; supported versions: {supported}. Install one "
        "of them, update engram-table-server, or set ENGRAM_REQUIRED=0 to run on SGLang's own tables"
    )
    found: str
    supported: str
    problem: str


class EngineSettingInvalid(EngineError):
    template = "{variable} is {value!r}; allowed: {allowed}"
    variable: str
    value: str
    allowed: str


class LayerGeometryMismatch(EngineError):
    """The engine's model and the daemon's have tables of different shapes for a layer."""

    template = (
        "layer {layer_id} of this model has a table of {model_rows} rows in {model_columns} columns and the daemon "
        "serves one of {served_rows} rows in {served_columns}; start engram-server with this model's model_path, or "
        "set ENGRAM_REQUIRED=0 to run on SGLang's own tables"
    )
    layer_id: int
    model_rows: int
    model_columns: int
    served_rows: int
    served_columns: int


class CheckpointDiffers(EngineError):
    """Found after the weights were loaded, so that no table of the engine's own is left to fall back to."""

    template = (
        "layer {layer_id}: {differing} of {compared} rows of the engine's checkpoint are not the rows that the daemon "
        "serves (first: row {first_row}); start engram-server with this engine's model_path, or unset ENGRAM_ENDPOINT"
    )
    layer_id: int
    compared: int
    differing: int
    first_row: int


class GroupUndecided(EngineError):
    """ENGRAM_REQUIRED=0: this rank could attach, another could not, and all of them must do the same."""

    template = "{failed} of {ranks} ranks cannot use the daemon; see their logs"
    failed: int
    ranks: int
