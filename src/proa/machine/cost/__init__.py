"""Decisions made while requests run, from rates and counts observed in service: which experts swap places (heat), which
experts the GPU reads over PCIe (co_fetch), how prefill and decode divide time (turns). The split of a prompt's experts
between the CPU and streaming over PCIe belongs here too; it is not implemented.

Everything here is arithmetic: numbers in, decisions out; equal inputs give equal decisions. Callers (hybrid/, engine/,
plan/) measure and execute. Never: torch, clocks, I/O, weights.
"""
