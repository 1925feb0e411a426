"""backends/dynamo."""
