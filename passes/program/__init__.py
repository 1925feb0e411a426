"""passes/program."""
