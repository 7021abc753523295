"""Compares every path that this machine has for a model with the reference ops. Never: repairing, serving."""
