"""Every decision, made once and explained: options -> frozen Plan. Never: torch, tensors."""
