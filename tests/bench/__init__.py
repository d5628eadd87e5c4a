"""Benchmarks: ratios against a named baseline in the same run. `make bench`; never part of the tests."""
