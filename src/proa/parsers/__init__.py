"""Parsers of generated text: reasoning, tool calls, and the visible answer, from the formats of the model families."""
