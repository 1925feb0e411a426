"""The places: Dynamo entry, lowering, runtime and storage tiers."""
