"""Validation: schedules on real ranks held against the reference, law by law."""
