"""compiler/capture."""
