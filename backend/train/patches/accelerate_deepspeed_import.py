"""accelerate imports DeepSpeed at the first save of every run.

utils/other.py, `extract_model_from_parallel`: if DeepSpeed is installed, accelerate imports it only to test whether the
model is a DeepSpeedEngine. Without the patch each run without DeepSpeed waits for seconds at its first save, and
DeepSpeed's import writes lines into the log.
"""

from __future__ import annotations

import accelerate.utils.other

LIBRARY, SEEN_IN = "accelerate", "1.15.0"


def apply() -> None:
    """Hide DeepSpeed from accelerate there. Only for runs that do not use DeepSpeed."""
    accelerate.utils.other.is_deepspeed_available = lambda: False
