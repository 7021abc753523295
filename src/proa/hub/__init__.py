"""Finds the model that a user names: local paths, aliases, the hub's cache on disk, downloads from the hub."""
