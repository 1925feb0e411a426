"""compiler/graph."""
