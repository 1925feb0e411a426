"""backends/codecs."""
