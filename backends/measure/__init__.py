"""backends/measure."""
