def pump(
    fd: int,
    offset: int,
    nbytes: int,
    target: int,
    slots: tuple[int, ...],
    slot_bytes: int,
    streams: tuple[int, ...],
    copy: int,
    wait: int,
) -> tuple[str, int, int]:
    """Reads bytes `[offset, offset + nbytes)` of a file piece by piece into the slots, in turn, and starts their
    copies to `target` and following, without the GIL. The last copies may be on their way when it returns.

    slots: addresses of 1 to 64 pieces of pinned memory of `slot_bytes` each; streams: one for each slot. copy,
    wait: addresses of cuMemcpyHtoDAsync_v2 and cuStreamSynchronize, called in the context of this thread; both 0:
    nothing is copied, which measures reading alone. Reads that are short or interrupted are continued.

    Returns how it ended, where in the file (the bytes before are read, and their copies started), and a code:

        ("done", offset + nbytes, 0)
        ("end", at, 0)         the file ends there
        ("read", at, errno)
        ("copy", at, code)     the CUresult of the call; so too for "wait"

    Raises ValueError for arguments that make no sense.
    """
