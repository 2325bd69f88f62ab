"""Timings of what users wait for. Printed as a table, never asserted."""
