"""The places where run page and runs page grow: constant HTML, no data in it.

Floor 6. Imports: nothing. Script fills them (static/run.js, static/runs.js) from the page's own routes, by
`textContent` only.
"""

from __future__ import annotations

RUN = '<div id="fp-run-page"></div>'
RUNS = '<div id="fp-runs-page"></div>'


def run_html() -> str:
    """Where one run is shown: `FPRun.mount()` fills it."""
    return RUN


def runs_html() -> str:
    """Where all runs are listed: `FPRuns.mount()` fills it."""
    return RUNS
