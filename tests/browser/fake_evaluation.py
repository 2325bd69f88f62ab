"""Stands in for the process of an evaluation: it works until the file `go` exists, and then has a result."""

import json
import time
from pathlib import Path

from backend.models import evaluation
from backend.models.intervals import compare

HERE = Path()
SCORES = {"exact_match": ([0.0] * 20 + [1.0] * 5, [1.0] * 20 + [0.0] * 5), "chrf": ([0.5, 0.4] * 12, [0.4, 0.5] * 12)}


def main():
    settings = evaluation.read_settings(HERE)
    progress = {"phase": "evaluating", "text": "Generating outputs of the trained model (8 of 25).", "fraction": 0.25}
    (HERE / "progress.json").write_text(json.dumps(progress))
    while not (HERE / "go").exists():
        time.sleep(0.02)
        if (HERE / "stop").exists():
            return
    comparisons = [compare(name, name.title(), *sides) for name, sides in SCORES.items()]
    comparisons.append(compare("general_loss", "Loss per token on general texts", [2.0] * 9, [2.5] * 9, [7] * 9))
    rows = [
        {
            "prompt": f"Prompt {number}", "reference": "R", "base": "<b>bold</b>", "trained": "",
            "scores": {"exact_match": [before, after], "loss": [2.0, 1.0]},
        }
        for number, (before, after) in enumerate(zip(*SCORES["exact_match"], strict=True))
    ]  # fmt: skip
    if settings.samples_per_prompt > 1:
        drawn = [{"text": f"Output {n}", "scores": {"exact_match": n % 2}} for n in range(settings.samples_per_prompt)]
        rows = [{**row, "samples": {"base": drawn, "trained": drawn}} for row in rows]
    (HERE / evaluation.EXAMPLES).write_text(json.dumps(rows))
    result = {"examples": 25, "generated": 25 if settings.examples else 0, "limits": ["A limit."]}
    result["comparisons"] = [each.as_json() for each in comparisons]
    if settings.judge:
        result["judge"] = {"sentence": f"{settings.judge.name} preferred the trained model in 5 of 25 examples."}
    (HERE / "result.json").write_text(json.dumps(result))


main()
