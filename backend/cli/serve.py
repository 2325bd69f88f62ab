"""The command serve: serves a model of a run with an OpenAI-compatible API until it is stopped."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json
from backend.cli.jobs import follow, model_step, report
from backend.cli.runs import find_run
from backend.models import serve
from backend.runs.folder import ALIVE, Run


def start(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, the end of the terminal or SIGTERM; with --background, only until the server answers."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    settings = serve.Settings(**{each.name: getattr(arguments, each.name) for each in fields(serve.Settings)})
    run, token = find_run(Path(arguments.runs), arguments.run), serve.own_token(arguments.token_file)
    if serve.engine_of(run, settings) == serve.VLLM:  # llama.cpp serves a file
        settings = replace(settings, step=model_step(run, settings.step))
    before = serve.current(run)
    try:
        job = serve.start(run, settings, token)
    except KeyboardInterrupt:
        _end_started(run, before)
        raise
    follow(job, lambda: serve.as_json(job)["address"])
    try:
        shown = serve.as_json(job)
        if not shown["address"]:
            return report(job, shown, arguments.json, lambda: _print_end(job))
        print_json({**shown, "folder": str(job.path)}) if arguments.json else _print(shown, arguments.background)
    except KeyboardInterrupt:
        job.stop(save=False)
        if arguments.background:
            follow(job)
            raise
    if arguments.background:
        return 0
    follow(job)
    return report(job, serve.as_json(job), False, lambda: _print_end(job))


def _end_started(run: Run, before: Run | None) -> None:
    """Stop the server that was started just now; `before` is the server of an earlier command."""
    job = serve.current(run)
    if job and (not before or job.id != before.id) and job.state in ALIVE:
        job.stop(save=False)
        follow(job)


def _print_end(job: Run) -> None:
    print(job.result()["text"], file=sys.stderr)


def _print(shown: dict[str, Any], in_background: bool) -> None:
    is_vllm = shown["engine"] == serve.VLLM
    place = "with vLLM" if is_vllm else "on the CPU"
    files = " and ".join(Path(name).name for name in (shown["file"], shown["adapter"]) if name)
    print(f"Serving {files} {place} at {shown['address']}. Model name in requests: {shown['name']}")
    parallel = f" Concurrent requests: {shown['parallel']}." if shown["parallel"] else ""
    print(f"Context: {shown['context']:,} tokens per request.{parallel}")
    print(f"Requests need the API token in {shown['token_file']}, a file that only you can read.")
    if not shown["is_chat"]:
        print("This is not a chat model: use /v1/completions, and not /v1/chat/completions.")
    elif shown["without_tools"]:
        print(shown["without_tools"])
    if shown["note"]:
        print(shown["note"])
    print(f"\n{shown['curl']}\n{shown['python']}")
    stop = f"footplate stop {shlex.quote(str(Path(shown['token_file']).parent))}"
    print(f"To stop it: {stop}" if in_background else "Ctrl-C stops it.", flush=True)
