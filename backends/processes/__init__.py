"""backends/processes."""
