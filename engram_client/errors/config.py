"""What is wrong with a configuration: exit code 2."""

from __future__ import annotations

from engram_client.errors.base import EXIT_CONFIG, EngramError


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


class PackageMissing(ConfigError):
    template = "{doing} needs the Python package {package}; install this distribution with its extra [{extra}]"
    doing: str
    package: str
    extra: str
