"""Trains the run in the current folder under torch's profiler and writes the names of all recorded operators and
kernels to operators.json. The run is trained as `python -m backend.train .` does."""

import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from backend.train import __main__ as training
from backend.train import exit

sys.argv[1:] = ["."]
kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
with profile(activities=kinds) as profiler:
    training.main()
Path("operators.json").write_text(json.dumps(sorted({event.name for event in profiler.events()})))
exit.exit_now()
