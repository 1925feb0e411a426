"""backends/construct."""
