"""Evaluations as they are after their end, with scores of the test's choice; tests/process evaluates."""

import json
from dataclasses import asdict

from backend.models import evaluation
from backend.models.evaluation import SCORES_FILE, Settings
from backend.models.intervals import compare
from backend.runs import GENERAL_LOSS, LOCK, RESULT, jobs

LABELS = {"exact_match": "Exact match", "loss": "Loss per token", GENERAL_LOSS: "Loss per token on general texts"}
LOSSES = ("loss", GENERAL_LOSS)


def plant_evaluation(run, scores, settings=None, contents=None, labels="a"):
    """`scores`: name -> (values of the base model, values of the trained model); the example `n` has the content
    `contents[n]`, by default n. General texts have contents of their own."""
    settings = settings or Settings()
    versions = evaluation._versions(run, settings)
    job = jobs.create(run, jobs.EVALUATION, {**asdict(settings), **versions}, {}, {})
    (job.path / LOCK).touch()
    numbers = {}
    for name, pairs in scores.items():
        for n, pair in enumerate(zip(*pairs, strict=True)):
            content = f"general {n}" if name == GENERAL_LOSS else f"content {contents[n] if contents else n}"
            entry = numbers.setdefault(content, {"scores": {}, "tokens": 3 + n % 4, "labels": labels})
            entry["scores"][name] = list(pair)
    own = sum(not content.startswith("general") for content in numbers)
    comparisons = [
        compare(name, LABELS.get(name, name), *pairs, [3 + n % 4 for n in range(len(pairs[0]))] * (name in LOSSES))
        for name, pairs in scores.items()
    ]
    result = {"examples": own, "generated": own, "comparisons": [each.as_json() for each in comparisons], "limits": []}
    (job.path / RESULT).write_text(json.dumps(result))
    (job.path / SCORES_FILE).write_text(json.dumps(numbers))
    (job.path / "state.json").write_text(json.dumps({"end": "done", "exit_code": 0}))
    return job
