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
    nothing is copied, which measures reading alone. Reads that are short or interrupted are continued. A thread whose
    next slot is still to be fetched watches its tally, yields its core every few microseconds, and asks the driver
    every half millisecond whether something has failed.

    Returns how it ended, where in the file (the bytes before are read; of those in a slot that was not filled, no copy
    was started), and a code:

        ("done", offset + nbytes, 0)
        ("end", at, 0)         the file ends there
        ("read", at, errno)
        ("copy", at, code)     the CUresult of the call; so too for "mark"
        ("wait", at, code)     that of something started earlier in this context, perhaps by another thread

    Raises ValueError, TypeError or OverflowError for a range or slots that make no sense.
    """
