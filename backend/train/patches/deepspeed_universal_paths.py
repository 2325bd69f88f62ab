"""DeepSpeed's converter to universal checkpoints uses paths as patterns.

checkpoint/ds_to_universal.py, `_merge_zero_shards`: paths go into `glob` and `re.compile` without being escaped.
Without the patch the conversion fails in folders whose names have a plus, a bracket or the like.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"


@contextmanager
def relative_source(folder: Path, source: Path) -> Iterator[str]:
    """Work in `folder`, where the result is a link to `source`: a path without special characters."""
    (folder / "source").symlink_to(source.resolve())
    with chdir(folder):
        yield "source"
