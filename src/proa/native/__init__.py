"""Typed bindings of csrc, Proa's native library. Belongs here: one module per topic of proa/native.h, each with its
table of signatures, and checks of arguments from Python. Never: torch, arithmetic, decisions.
"""
