"""passes/segment."""
