"""What the user asks: options declared once, read from flags, YAML and keywords, and the debug switches.
Never: devices, decisions, model names."""
