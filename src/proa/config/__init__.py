"""Options, each declared once and read from flags, YAML and Python keywords; and the environment's debug switches."""
