"""Downloadable images of runs.

The modules import matplotlib, which takes half a second and 50 MB and is rarely needed, so each module is imported at
its first request.
"""
