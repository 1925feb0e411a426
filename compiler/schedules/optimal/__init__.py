"""compiler/schedules/optimal."""
