"""What is wrong with a message."""

from __future__ import annotations

from engram_client.errors.base import EngramError


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
