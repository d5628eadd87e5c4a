"""How a rank maps what it was handed: one file a kind of handle.

hostmem.py      a descriptor of host memory, for the CPU
registered.py   the same, and readable for a GPU
vmm.py          memory that the CUDA driver allocated, on the host or on a GPU: a descriptor or a FABRIC blob
segments.py     which of these a segment needs; all segments of a client or none
window.py       the bytes of mapped memory as a view, and whether anybody still holds one
lock.py         one rank at a time
"""
