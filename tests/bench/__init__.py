"""Timings of what people wait for. Printed as a table, never asserted."""
