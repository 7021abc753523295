"""Constraints on an answer's text: translation, compilation, and the tokens that may come next."""
