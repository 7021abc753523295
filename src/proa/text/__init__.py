"""Text <-> tokens: tokenizers, chat templates, detokenisation, stop strings, answers. Never: HTTP, torch."""
