"""The OpenAI-compatible HTTP server. Never: tokenising, scheduling, printing."""
