"""Benchmarks: each answers one question and compares the result with the hardware limit (the roof).

Each benchmark is a module with a group of options and `run(...) -> Result`; proa/cli parses options and prints results.
Benchmarks use public interfaces only, no engine internals.
"""
