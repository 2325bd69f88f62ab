"""Processes that use the trained model. Started as jobs of a run (backend/runs/jobs.py); they import torch, and no
other package imports them."""
