"""compiler/capture/steps."""
