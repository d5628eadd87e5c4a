"""What the machine does not have enough of: exit code 3."""

from __future__ import annotations

from engram_client.errors.base import EXIT_RESOURCES, EngramError


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
