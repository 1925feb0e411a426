"""compiler/capture/fusion."""
