"""The command merge: merges the adapter of a run into its base model, and prints how the models compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from backend.cli.jobs import follow, model_step, report
from backend.cli.runs import find_run
from backend.models import merge
from backend.runs import jobs
from backend.runs.folder import Run


def start(arguments: argparse.Namespace) -> int:
    """Merge and wait for the end; Ctrl-C stops it."""
    run = find_run(Path(arguments.runs), arguments.run)
    job = merge.start(run, model_step(run, arguments.step))
    follow(job)
    shown = jobs.as_json(job)
    return report(job, shown, arguments.json, lambda: _print_result(job, shown["result"]))


def _print_result(job: Run, result: dict[str, Any]) -> None:
    certificate = result["certificate"]
    saved, change = certificate["adapter_to_saved"], certificate["adapter_to_base"]
    print(f"Merged model: {job.path / result['model']}")
    status = certificate["status"].capitalize()
    print(f"{status}: the merged model was loaded from its files and compared with the base model and the adapter.")
    if certificate["is_reward_model"]:
        texts, most = saved["positions"], saved["kl_max"]
        print(f"The scores of {texts} texts differ from the unmerged model's by at most {most:.2g}.")
    else:
        print(f"KL divergence from base model with adapter: {saved['kl_mean']:.2g} nats per token.", end=" ")
        print(f"For comparison, the base model without the adapter: {change['kl_mean']:.2g}.")
        print(f"Same most likely next token: {saved['same_argmax']:.1%} of {saved['positions']} positions.")
    print(f"Base model: {certificate['base_model']}, {certificate['base_weights']}.")
    for limit in certificate["limits"]:
        print(f"Limitation: {limit}")
