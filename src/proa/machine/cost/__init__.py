"""Decisions made while requests run, from rates and counts observed in service: which experts swap places (heat), which
experts the GPU reads over PCIe (co_fetch), how prefill and decode divide time (turns), which of a prompt's experts are
copied to the GPU and which the CPU computes (prefill).

Everything here is arithmetic: numbers in, decisions out; equal inputs give equal decisions. Callers (hybrid/, engine/,
plan/) measure and execute. Never: torch, clocks, I/O, weights.
"""
