"""The HTTP server: OpenAI's chat and completions API, Anthropic's messages API, health and metrics."""
