"""The `proa` program: one subcommand a file, imported when it is called. Never: work that a library user could need."""
