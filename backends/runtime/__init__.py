"""backends/runtime."""
