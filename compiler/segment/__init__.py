"""compiler/segment."""
