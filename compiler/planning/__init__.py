"""compiler/planning."""
