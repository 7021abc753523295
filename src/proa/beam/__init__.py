"""Beam search: the rules, and the loop that asks an engine for one token per live beam. Never: text, torch."""
