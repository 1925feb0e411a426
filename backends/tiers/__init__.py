"""backends/tiers."""
