"""compiler/capture/normal."""
