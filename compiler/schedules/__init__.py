"""compiler/schedules."""
