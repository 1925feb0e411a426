"""compiler/program."""
