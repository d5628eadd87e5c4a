"""What is wrong with a checkpoint, or with memory that should hold it: exit code 4."""

from __future__ import annotations

from engram_client.errors.base import EXIT_CHECKPOINT, EngramError


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
