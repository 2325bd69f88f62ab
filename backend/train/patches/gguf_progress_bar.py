"""transformers' GGUF reader shows a progress bar that nothing switches off.

modeling_gguf_pytorch_utils.py uses tqdm itself instead of transformers.utils.logging's, so `disable_progress_bar` has
no effect. Without the patch the bar writes a hundred lines into the run's log.
"""

from __future__ import annotations

import functools

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply() -> None:
    """Disable the bar."""
    from transformers import modeling_gguf_pytorch_utils as reader  # noqa: PLC0415  (seconds; only the first use pays)

    reader.tqdm = functools.partial(reader.tqdm, disable=True)
