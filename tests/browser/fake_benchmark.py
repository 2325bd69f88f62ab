"""Stands in for the process of a benchmark: it works until the file `go` exists, and then has a result."""

import json
import time
from pathlib import Path

from backend.inference.benchmark_results import rows
from backend.models import benchmark

HERE = Path()


def side(better, worse):
    """lm-eval's result for 30 samples, with the same values of the metric same for all sides."""
    samples = [
        {"doc_id": n, "filter": "none", "better": better[n % 5], "worse": worse[n % 5], "same": n % 2}
        for n in range(30)
    ]  # fmt: skip
    metrics = ("better", "worse", "same")
    means = {f"{name},none": sum(sample[name] for sample in samples) / 30 for name in metrics}
    return {
        "results": {"colors": {**means, "better_stderr,none": 0.05, "perplexity,none": 12.5}},
        "n-shot": {"colors": 0},
        "higher_is_better": {"colors": dict.fromkeys(metrics, True)},
        "samples": {"colors": samples},
    }


def main():
    benchmark.read_settings(HERE)
    progress = {"phase": "measuring", "text": "Measuring the trained model (8 of about 60 requests).", "fraction": 0.25}
    (HERE / "progress.json").write_text(json.dumps(progress))
    while not (HERE / "go").exists():
        time.sleep(0.02)
        if (HERE / "stop").exists():
            return
    low, high = [0, 0, 0, 0, 1], [1, 1, 1, 1, 0]
    found = rows({"base": side(low, high), "trained": side(high, low)})
    (HERE / benchmark.SAMPLES).write_text('{"doc_id": 0}\n')
    result = {"rows": found, "limits": ["A limit."], "chat_template": True, "versions": {"lm_eval": "0.4.13"}}
    (HERE / "result.json").write_text(json.dumps(result))


main()
