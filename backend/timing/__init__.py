"""Time estimate: seconds of an optimizer step and of a run before it starts. Closed formulas, no torch.

- rates: what GPUs, links and networks reach of their data sheets
- batch: tokens and padding of a batch; context: what all parts need
- computing, communication: the parts of a step; whole_run: all else that a run does
- estimate: time_of() and its result; uncertainty: the range; unpredictable: why no time is predicted
- texts: the estimate as JSON and in words
"""

from __future__ import annotations

from backend.timing.computing import Part
from backend.timing.estimate import TimeEstimate, time_of
from backend.timing.rates import CALIBRATION, Calibration
from backend.timing.texts import time_json
