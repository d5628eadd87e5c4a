Slot = tuple[int, int, int, int]
"""memory, stream, tally, mark: the address of a piece of pinned memory, a stream, the address of 8 bytes of pinned
memory, zero before their first use, and the address under which the GPU writes there."""

def pump(
    fd: int,
    offset: int,
    nbytes: int,
    target: int,
    slots: tuple[Slot, ...],
    slot_bytes: int,
    copy: int,
    mark: int,
    query: int,
) -> tuple[str, int, int]:
    """Reads bytes `[offset, offset + nbytes)` of a file piece by piece into the slots, in turn, and starts their
    copies to `target` and following, without the GIL. The last copies may be on their way when it returns.

    slots: 1 to 64 pieces of `slot_bytes` each, of no other thread. copy, mark, query: addresses of
    cuMemcpyHtoDAsync_v2, cuStreamWriteValue32_v2 and cuStreamQuery, called in the context of this thread; all 0:
    nothing is copied, which measures reading alone. Reads that are short or interrupted are continued. A slot that is
    still to be fetched is watched, by a core that does nothing else and yields it every few microseconds.

    Returns how it ended, where in the file (the bytes before are read, and their copies started), and a code:

        ("done", offset + nbytes, 0)
        ("end", at, 0)         the file ends there
        ("read", at, errno)
        ("copy", at, code)     the CUresult of the call; so too for "mark"
        ("wait", at, code)     that of something started earlier in this context, perhaps by another thread

    Raises ValueError, TypeError or OverflowError for arguments that make no sense.
    """
