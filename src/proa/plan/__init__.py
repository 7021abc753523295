"""Every decision, made once and explained. Belongs here: asked options -> frozen Plan. Never: torch, tensors."""
