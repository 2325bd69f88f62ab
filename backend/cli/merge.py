"""The command merge: the adapter of a run in the weights of its base model, and what the comparison says."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json
from backend.cli.runs import OUTCOMES, find_run
from backend.runs import jobs
from backend.runs.folder import ALIVE, Run
from backend.tasks import merge

POLL_SECONDS = 0.25


def start(arguments: argparse.Namespace) -> int:
    """Merge and wait for the end; Ctrl-C stops it."""
    job = merge.start(find_run(Path(arguments.runs), arguments.run), arguments.step)
    _follow(job)
    shown = jobs.as_json(job)
    if arguments.json:
        print_json({**shown, "folder": str(job.path)})
    elif shown["state"] == "done":
        _print_result(job, shown["result"])
    else:
        failure = shown["failure"]
        print(f"{failure['sentence']} {failure['help']}".strip() if failure else shown["sentence"], file=sys.stderr)
    return OUTCOMES.get(shown["state"], 1)


def _follow(job: Run) -> None:
    """Print each phase to stderr until the job has ended."""
    printed = ""
    while (state := job.state) in (*ALIVE, "new"):
        try:
            text = job.progress().get("text", "") or job.summary()["sentence"]
            if text != printed:
                printed = text
                print(text, file=sys.stderr, flush=True)
            time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            if state == "stopping":
                raise
            job.stop(save=False)


def _print_result(job: Run, result: dict[str, Any]) -> None:
    certificate = result["certificate"]
    saved, change = certificate["adapter_to_saved"], certificate["adapter_to_base"]
    print(f"Merged model: {job.path / result['model']}")
    print(f"{certificate['status'].capitalize()}: the merged model was loaded from its files and compared.")
    if certificate["is_reward_model"]:
        print(f"The scores of {saved['positions']} texts differ by at most {saved['kl_max']:.2g}.")
    else:
        print(f"KL divergence from base model with adapter: {saved['kl_mean']:.2g} nats per token.", end=" ")
        print(f"For comparison, the base model alone: {change['kl_mean']:.2g}.")
        print(f"Same most likely next token: {saved['same_argmax']:.1%} of {saved['positions']} positions.")
    print(f"Base model: {certificate['base_model']}, {certificate['base_weights']}.")
    for limit in certificate["limits"]:
        print(f"Limitation: {limit}")
