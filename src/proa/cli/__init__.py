"""The `proa` program: one module per subcommand, imported when it is called. Never: features that a library user may
need; they belong in the other packages."""
