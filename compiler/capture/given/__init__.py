"""compiler/capture/given."""
