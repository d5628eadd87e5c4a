"""What keeps an engine's Engram layers from reading the daemon's tables."""

from __future__ import annotations

from engram_client.errors.base import EngramError


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
