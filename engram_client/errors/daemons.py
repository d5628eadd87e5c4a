"""Between a daemon and others of its endpoint: one that runs (exit code 5), and one that left tables in memory."""

from __future__ import annotations

from engram_client.errors.base import EXIT_ALREADY_RUNNING, EngramError

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
