"""Measurements, one question each, the physical limit beside the answer. Never: engine internals, private flags.

Each bench is a module with a group of options and `run(...) -> Result`; cli/bench.py parses, prints a table or JSON.
"""
