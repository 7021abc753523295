"""Output for people and monitoring: terminal, logging, progress, metrics, units."""
