"""Downloadable images of runs.

The modules import matplotlib, half a second and 50 MB that few requests need, so each is imported with its first one.
"""
