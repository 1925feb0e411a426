"""backends/front."""
