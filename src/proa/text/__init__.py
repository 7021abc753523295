"""Tokenizers, chat templates, incremental detokenisation, stop strings, answers. Never: importing torch."""
