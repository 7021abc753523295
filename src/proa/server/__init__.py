"""The HTTP server: OpenAI's API, and Anthropic's messages. Never: tokenising, scheduling, printing."""
