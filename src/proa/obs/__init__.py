"""What people and machines see of a running Proa: terminal, log, progress, metrics, units. Never: policy."""
