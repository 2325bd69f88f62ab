"""What is done around a run: fixing its spec, comparing strategies, rehearsing, testing devices, sweeping, retrying
after a failure, measuring, and packing it for a bug report.

The page and the command line call these; nothing below knows them.
"""
