"""`make bench`: latencies and throughput, measured on this machine and printed as a table."""

import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench import checking, page, peers, preparing, run_list, time_estimate, training

CASES = {
    "check": checking.measure,
    "page": page.measure,
    "runs": run_list.measure,
    "preparing": preparing.measure,
    "peers": peers.measure,
    "first step": training.first_step,
    "throughput": training.throughput,
    "callbacks": training.callbacks,
    "time estimate": time_estimate.measure,
}


def main() -> None:
    """Run the cases named on the command line, or all of them."""
    names = sys.argv[1:] or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"\n{name}")
            for what, values, unit in CASES[name](Path(folder)):
                print(f"  {what:44}  {line(values)} {unit}", flush=True)


def line(values: list[float]) -> str:
    """The median, and from 20 values on the 95th percentile."""
    ordered = sorted(values)
    p95 = f"   p95 {ordered[int(0.95 * (len(ordered) - 1))]:9.3f}" if len(ordered) >= 20 else ""
    return f"median {statistics.median(ordered):9.3f}{p95}   ({len(ordered)} values)"


if __name__ == "__main__":
    main()
