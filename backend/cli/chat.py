"""The command chat: outputs of the model of a run, and of its base model, for prompts from the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json
from backend.cli.jobs import say_newest
from backend.cli.runs import find_run
from backend.machine import probe
from backend.memory import inference
from backend.models import chat, chat_files
from backend.models.chat import SCORE, Offer
from backend.models.chat_files import BASE, DETAILS, OUTPUTS, SIDES, STOP, TUNED, Lines, Request
from backend.runs.folder import ALIVE, Run, RunError

POLL_SECONDS, TOUCH_SECONDS = 0.05, 3.0
NAMES = {TUNED: "Trained model", BASE: "Base model"}


def start(arguments: argparse.Namespace) -> int:
    """Generate for one prompt, or for each line of the terminal. Exit code 1 if there was an error."""
    run = find_run(Path(arguments.runs), arguments.run)
    offer = chat.offer(run)
    request = _request(offer, arguments)
    if request.step != arguments.step and TUNED in request.sides:
        say_newest(run, request.step)
    before = chat.current(run)
    was_alive = before is not None and before.state in ALIVE
    if not was_alive:
        memory = inference.of_chat(run, probe(run.path))
        print("\n".join(filter(None, (memory.text, memory.warning))), file=sys.stderr)
    client = _Client(chat.start(run), f"shell-{os.getpid()}", arguments.json)
    try:
        if arguments.prompt is None:
            return _loop(client, request)
        turn = client.generate(replace(request, prompt=arguments.prompt))
        if arguments.json:
            print_json({"run": run.id, "step": request.step, "prompt": arguments.prompt, "outputs": turn})
        return int(any("error" in output for output in turn.values()))
    finally:
        client.close(stop=not was_alive)


def _request(offer: Offer, arguments: argparse.Namespace) -> Request:
    """What all requests of this command have in common. Raises RunError."""
    if arguments.step is not None and arguments.step not in offer.steps:
        known = ", ".join(str(step) for step in offer.steps if step is not None)
        raise RunError(f"No checkpoint of step {arguments.step} can be loaded. Loadable steps: {known or 'none'}.")
    step = offer.steps[0] if arguments.step is None else arguments.step
    sides = SIDES if arguments.models == "both" else (arguments.models,)
    if BASE in sides and offer.without_base:
        raise RunError(offer.without_base)
    if (offer.mode == SCORE) != bool(arguments.completion):
        needs = "This run trained a reward model: set --prompt, and --completion twice." if offer.mode == SCORE else ""
        raise RunError(needs or "--completion needs a reward model, and this run trained a language model. Remove it.")
    if arguments.prompt is None and (arguments.completion or arguments.json):
        raise RunError("Set --prompt too: --completion and --json are for a single prompt.")
    request = Request(
        conversation=f"shell-{os.getpid()}-{time.time_ns()}", sides=sides, step=step, system=arguments.system,
        answers=tuple(arguments.completion), temperature=arguments.temperature, top_p=arguments.top_p,
        max_new_tokens=arguments.max_new_tokens, seed=arguments.seed, prompt=arguments.prompt or "?",
        tools=_tools(arguments.tools), template_kwargs=_template_kwargs(arguments.chat_template_kwargs),
    )  # fmt: skip
    if problem := request.problem():
        raise RunError(problem)
    return request


def _tools(file: str | None) -> str:
    """The JSON in a file of tools. Raises RunError."""
    if file is None:
        return ""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunError(f"--tools {file} cannot be read: {reason}.") from error


def _template_kwargs(text: str) -> Any:
    """The variables in the argument. Raises RunError."""
    try:
        return json.loads(text) if text else {}
    except ValueError as error:
        raise RunError(
            f'--chat-template-kwargs is not valid JSON: {error}. Set an object, such as {{"enable_thinking": false}}.'
        ) from error


def _loop(client: _Client, request: Request) -> int:
    """Prompts from the terminal until Ctrl-D."""
    print("Ctrl-C stops an output, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if prompt.strip():
            try:
                client.generate(replace(request, prompt=prompt))
            except RunError as error:
                print(error, file=sys.stderr)
                if client.job.state not in ALIVE:
                    return 1


class _Client:
    """A client of the chat in the folder of `job`."""

    def __init__(self, job: Run, name: str, quiet: bool) -> None:
        self.job, self.name, self.quiet = job, name, quiet
        self.outputs = Lines(job.path / OUTPUTS, DETAILS)
        self.outputs.read()
        self.touched, self.shown, self.printed = 0.0, "", ""

    def generate(self, request: Request) -> dict[str, Any]:
        """Send a request and print its outputs while they are generated. Ctrl-C stops them. Returns them by side.
        Raises RunError if the chat has ended."""
        self._touch()
        id = chat_files.send(self.job.path, request)
        found: dict[str, dict[str, Any]] = {}
        stopped = False
        while len([side for side in found.values() if "end" in side]) < len(request.sides):
            try:
                self._touch()
                lines = [line for line in self.outputs.read() if line.get("id") == id]
                for line in lines:
                    chat_files.add(found, str(line["side"]), line)
                    self._print(request, str(line["side"]), line)
                if not lines:
                    self._wait()
            except KeyboardInterrupt:
                if stopped:
                    raise
                stopped = True
                chat_files.send(self.job.path, Request(kind=STOP, target=id))
        return {side: self._with_details(id, side, output) for side, output in found.items()}

    def _with_details(self, id: str, side: str, output: dict[str, Any]) -> dict[str, Any]:
        more = chat_files.details(self.job.path, id, side) if self.quiet else None
        if not more:
            return output
        names = ("id", "text", "probability")  # tokens of the prompt have no probability
        tokens = {
            key: [dict(zip(names, each, strict=False)) for each in more[key]] for key in ("prompt_tokens", "tokens")
        }
        return {**output, "prompt": more["prompt"], **tokens}

    def _touch(self) -> None:
        if time.monotonic() - self.touched > TOUCH_SECONDS:
            self.touched = time.monotonic()
            chat_files.touch_client(self.job.path, self.name)

    def _wait(self) -> None:
        """Show what the chat waits for. Raises RunError if it has ended."""
        if self.job.state not in ALIVE:
            failure, result = self.job.failure(), self.job.result()
            raise RunError(failure["sentence"] if failure else result.get("text") or "The chat has ended.")
        text = self.job.waits_for() or self.job.progress().get("text", "")
        if text and text != self.shown and not text.startswith("Generating"):
            print(text, file=sys.stderr, flush=True)
        self.shown = text
        time.sleep(POLL_SECONDS)

    def _print(self, request: Request, side: str, line: dict[str, Any]) -> None:
        """Print more of an output."""
        if self.quiet:
            return
        if "begin" in line and len(request.sides) > 1:
            print(f"{NAMES[side]}:", flush=True)
        if "begin" in line:
            self.printed = ""
        elif "end" not in line:
            self.printed += line.get("text", "")
            print(line.get("text", ""), end="", flush=True)
        else:
            self._print_end(request, line)

    def _print_end(self, request: Request, line: dict[str, Any]) -> None:
        if "error" in line:
            print(line["error"], file=sys.stderr, flush=True)
        elif "scores" in line:
            print(
                "\n".join(
                    f"{score:.4f}  {answer}" for score, answer in zip(line["scores"], request.answers, strict=True)
                )
            )
        else:
            print(str(line["text"]).removeprefix(self.printed), flush=True)  # the rest of the output
            print(f"({ending(line)})", file=sys.stderr, flush=True)

    def close(self, stop: bool) -> None:
        """Leave the chat; with `stop`, end it unless others use it."""
        chat_files.remove_client(self.job.path, self.name)
        if stop and not chat_files.other_clients(self.job.path, self.name) and self.job.state in ALIVE:
            self.job.stop(save=False)


def ending(output: dict[str, Any]) -> str:
    """How long an output took and how it ended: 42 tokens in 3.1 s, ended with <|im_end|>."""
    ends = {
        "stop token": f"ended with {output.get('stop')}",
        "limit": f"ended at the limit of {output.get('limit')} tokens",
        "context": f"ended after {output.get('limit')} tokens, at the model's context length",
        "stopped": "stopped",
    }
    count = output.get("tokens", 0)
    if not count:
        return ends.get(output["end"], str(output["end"]))
    return f"{count} {'token' if count == 1 else 'tokens'} in {output['seconds']:.1f} s, {ends[output['end']]}"
