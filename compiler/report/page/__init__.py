"""compiler/report/page."""
