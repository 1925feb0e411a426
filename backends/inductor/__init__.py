"""backends/inductor."""
