"""The CUDA driver as this project uses it: one interface, the real driver behind it, or a test's.

driver.py   the interface, its vocabulary, and what a failed call means
real.py     the interface over cuda.bindings; imported only when a GPU is used
access.py   which of them this process has
"""
