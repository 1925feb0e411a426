"""compiler/capture/lengths."""
