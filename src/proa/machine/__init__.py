"""Probes this machine: CPUs, memory, NUMA nodes, GPUs, limits of control groups, load. Never: importing torch."""
