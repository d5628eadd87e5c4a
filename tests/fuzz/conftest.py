"""The live tests use the system tests' checkpoint and folders."""

from tests.system.conftest import checkpoint, folder

__all__ = ["checkpoint", "folder"]
