"""Decisions, one a file, all pure: from values to values, no clock, no I/O."""
