"""The verbs: functions from a legal training program to a legal training program."""
