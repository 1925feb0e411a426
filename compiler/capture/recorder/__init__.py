"""compiler/capture/recorder."""
