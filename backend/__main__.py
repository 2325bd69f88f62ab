"""Command line: `footplate COMMAND`; COMMANDS lists them.

The page and the command line call the same functions. With --json stdout is one JSON document and nothing else. Exit
codes: `check` 0 without error findings, 1 with; `run --follow` and `resume --follow` 0 done, 1 failed, 3 stopped, as
`rehearse` and `tune`; `test-devices` 1 if one is slow; `export` 1 if the files would be refused; 2 for a spec, file or
run that cannot be read or found.
"""

from __future__ import annotations

import argparse
import difflib
import re
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from backend import paths
from backend.cli import (
    benchmark,
    chat,
    commands,
    device_test,
    environments,
    estimate,
    evaluate,
    export,
    export_metrics,
    export_model,
    merge,
    prepared_data,
    publish,
    rehearse,
    report_measurement,
    runs,
    runs_list,
    serve,
    show_data,
    sweep,
    tune,
)
from backend.config.options import SpecError
from backend.environments import ENVIRONMENTS
from backend.models import quantized
from backend.models.benchmark import LIMIT
from backend.models.gguf import DEFAULT, FORMATS
from backend.models.serve import DTYPES as SERVE_DTYPES
from backend.models.serve import LLAMA_CPP, VLLM
from backend.runs.folder import RunError
from backend.tasks.tuning.tuning import MINUTES

Command = Callable[[argparse.Namespace], int]
RUN_HELP = "the ID of a run, a unique prefix of it, its name, or its folder"
STEP_HELP = "the checkpoint of this step (default: the final model, or the newest checkpoint of a run without one)"
# Commands that stop what they have started, as with Ctrl-C: `timeout` and schedulers send SIGTERM.
STOPPED_BY_SIGTERM = ("rehearse", "tune", "test-devices", "evaluate", "benchmark", "merge", "export-model", "publish")
FOLLOW = "print the log until the run has ended; exit code 0 done, 1 failed, 3 stopped"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Invalid input is a sentence on stderr and code 2, never a traceback."""
    arguments = parser().parse_args(argv)
    paths.settle()
    if arguments.command in STOPPED_BY_SIGTERM:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _check_runs_folder(arguments)
        return COMMANDS[arguments.command](arguments)
    except SpecError as error:
        for problem in error.problems:
            print(f"{problem.field}: {problem.message}" if problem.field else problem.message, file=sys.stderr)
    except RunError as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:  # such as `| head`: the code of a program that SIGPIPE ends, since 0 says "no error"
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"{error.filename or 'A file'}: {error.strerror or error}.", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


def _check_runs_folder(arguments: argparse.Namespace) -> None:
    """Raise RunError if there cannot be a folder with runs, because something else has this name. Runs that are named
    by their own folders need none."""
    named, folder = getattr(arguments, "run", None) or (), Path(getattr(arguments, "runs", None) or ".")
    if named and all(Path(name).is_dir() for name in ([named] if isinstance(named, str) else named)):
        return
    existing = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    if not existing.is_dir():
        raise RunError(f"--runs {folder}: {existing} is not a folder. Set --runs to the folder that contains the runs.")


COMMANDS: Mapping[str, Command] = {
    "check": commands.check,
    "plan": commands.plan,
    "estimate": estimate.estimate,
    "data": show_data.start,
    "prepare": prepared_data.prepare,
    "cache": prepared_data.cache,
    "run": runs.run,
    "rehearse": rehearse.start,
    "tune": tune.start,
    "test-devices": device_test.start,
    "sweep": sweep.start,
    "queue": runs.queued,
    "list": runs_list.list_runs,
    "annotate": runs_list.annotate,
    "show": runs.show,
    "stop": runs.stop,
    "resume": runs.resume,
    "chat": chat.start,
    "evaluate": evaluate.start,
    "benchmark": benchmark.start,
    "logs": runs.logs,
    "metrics": runs.metrics,
    "export-metrics": export_metrics.start,
    "stacks": runs.explain_stacks,
    "bundle": runs.bundle,
    "report-measurement": report_measurement.start,
    "retry": runs.retry,
    "merge": merge.start,
    "publish": publish.start,
    "export-model": export_model.start,
    "serve": serve.start,
    "import": commands.import_file,
    "export": export.start,
    "env": environments.start,
    "machine": commands.describe_machine,
    "presets": commands.presets,
    "rules": commands.rules,
    "docs": commands.docs,
    "ui": commands.ui,
}


class Parser(argparse.ArgumentParser):
    """Names the command, option or choice that is closest to one that does not exist."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but unknown arguments are an error here already, where the options of the command are known."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            hints = (_suggestion(name.partition("=")[0], options) for name in unknown)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, hints), '')}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message` to stderr, and exit with code 2."""
        name, _, choices = message.partition(" (choose from ")
        wrong, known = re.search(r"invalid choice: '(.*)'", name), re.findall(r"[^', )]+", choices)
        if wrong and (hint := _suggestion(wrong[1], known)):
            message = f"{name}{hint}"
        super().error(message)


def _suggestion(wrong: str, known: list[str]) -> str:
    """The end of an error, with the closest of the known words; '' if none is close."""
    closest = difflib.get_close_matches(wrong, known, n=1)
    return f". Did you mean {closest[0]}?" if closest else ""


AddCommand = Callable[..., Parser]


@cache
def parser() -> Parser:
    """Every command with its arguments."""
    top = Parser(
        prog="footplate",
        description="Check, plan and run fine-tuning of language models. `footplate ui` serves the web page.",
    )
    subcommands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    json_output = Parser(add_help=False)
    json_output.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else")
    folder = Parser(add_help=False)
    folder.add_argument("--runs", default="runs", metavar="DIR", help="folder that contains the runs (default: runs)")

    def command(name: str, *parents: Parser, help: str) -> Parser:
        description = f"{help[0].upper()}{help[1:]}."
        return subcommands.add_parser(name, parents=[*parents, json_output], help=help, description=description)

    _add_spec_commands(command, folder)
    _add_run_commands(command, folder)
    tools = "DeepSpeed, accelerate, LLaMA-Factory, axolotl or TRL"
    imported = command("import", help=f"print a configuration of {tools} as a spec")
    imported.add_argument("file", metavar="FILE", help="a JSON or YAML file")
    imported.add_argument(
        "--with-code",
        action="store_true",
        help="include what can run code or decide where data is sent, such as trust_remote_code and extra hosts",
    )
    cache = command("cache", help="list the tokenized datasets that are kept for later runs, or remove them")
    cache.add_argument(
        "action", choices=("list", "clear"), metavar="list|clear", help="list the datasets, or remove all"
    )
    purposes = "another trainer, GGUF files or benchmarks"
    env = command("env", help=f"create or remove an environment for {purposes}, or list those that exist")
    actions = ("create", "list", "remove")
    env.add_argument("action", choices=actions, metavar="create|list|remove", help="what to do")
    env.add_argument("name", nargs="?", choices=tuple(ENVIRONMENTS), help="(default of create: llamafactory)")
    command("machine", help="print a description of this machine, for --machine and the form of the page")
    command("presets", help="list the presets")
    command("rules", help="list the rules that `check` applies")
    command("docs", help="write docs/options.md and docs/rules.md (needs a checkout)")
    ui = subcommands.add_parser("ui", parents=[folder], help="serve the web page", description="Serve the web page.")
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    ui.add_argument("--port", type=int, default=7860, help="port to listen on; 0 takes a free one (default: 7860)")
    ui.add_argument("--no-login", action="store_true", help="serve every local user, without a token or password")
    ui.add_argument("--certfile", default="", metavar="FILE", help="TLS certificate (PEM), to serve HTTPS")
    ui.add_argument("--keyfile", default="", metavar="FILE", help="private key of --certfile")
    return top


def _target(name: str) -> str:
    """What an export is for. Raises ArgumentTypeError for a place that runs can start on without one."""
    if name in ("slurm", "ray"):
        place = f"SPEC --set launch.place={name}`"
        raise argparse.ArgumentTypeError(
            f"`footplate run {place} submits the run without an export, and `footplate plan {place} prints the job"
        )
    return name


def _position(text: str) -> int:
    """A number of examples or runs. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1,000,000,000")
    return int(text)


def _add_spec_commands(command: AddCommand, folder: Parser) -> None:
    """check, plan, estimate, data, prepare, run, rehearse, tune, test-devices, sweep."""
    spec = Parser(add_help=False)
    spec.add_argument("spec", metavar="SPEC", help="a YAML file with options, or the name of a preset")
    spec.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set one option; can be repeated"
    )
    machine = Parser(add_help=False)
    machine.add_argument(
        "--machine",
        metavar="NAME",
        help="check for another machine: a name in presets/machines such as 8x80gb, or a YAML file (default: this one)",
    )
    command("check", spec, machine, help="check a spec before launch: errors, warnings and advice with their fixes")
    plan = command("plan", spec, machine, help="print the exact launch command and the files that it reads")
    plan.add_argument("--launcher", choices=commands.launchers(), help="override launch.launcher of SPEC")
    estimated = command("estimate", spec, machine, folder, help="print memory, disk, time and price, item by item")
    estimated.add_argument(
        "--machines",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="compare time and price on several machines: all in presets/machines, or the YAML files in FOLDER",
    )
    data = command("data", spec, help="print examples as the model sees them, with what is trained on")
    data.add_argument("--first", type=_position, default=1, metavar="N", help="the first one (default: 1)")
    data.add_argument("--dataset", type=_position, default=1, metavar="N", help="dataset to print (default: 1)")
    data.add_argument("--count", type=_position, default=3, metavar="N", help="how many (default: 3)")
    command("prepare", spec, help="tokenize the dataset of a spec in advance, for later runs; needs no GPU")
    exported = command("export", spec, machine, help="write a spec for LLaMA-Factory, Kubernetes or SkyPilot")
    target = "what reads the files"
    exported.add_argument("--to", type=_target, choices=export.TARGETS, required=True, help=target)
    exported.add_argument("--out", default="", metavar="FOLDER", help="where (default: the value of --to)")
    run = command("run", spec, folder, help="start a run; it waits in the queue until its devices are free")
    after = run.add_mutually_exclusive_group()
    after.add_argument("--after-ok", metavar="RUN", help="start after this run has succeeded")
    after.add_argument("--after-any", metavar="RUN", help="start after this run has ended, in any state")
    run.add_argument("--follow", action="store_true", help=FOLLOW)
    run.add_argument("--skip-checks", action="store_true", help="start even if the checks report errors")
    command("rehearse", spec, folder, machine, help="try a spec: two steps, a crash, a resume, the saved model")
    _add_tune(command, spec, folder)
    command("test-devices", spec, folder, help="measure every device and link that a spec would use; name slow ones")
    _add_sweep(command, spec, folder)


def _add_sweep(command: AddCommand, spec: Parser, folder: Parser) -> None:
    sweep = command("sweep", spec, folder, help="queue a run for each combination of values")
    sweep.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="SECTION.KEY=VALUES",
        help="values of one option: 1e-5,1e-4 or 0.1..0.3 or log:1e-5..1e-3; a grid needs /POINTS after a range; "
        "values that are lists are in brackets: [q_proj,v_proj],[q_proj]",
    )
    for name, default, text in (
        ("--random", 0, "try N random samples instead of the grid"),
        ("--seeds", 1, "run each combination with N different seeds"),
        ("--limit", 50, "refuse more runs than this (default: 50)"),
    ):
        sweep.add_argument(name, type=_position, default=default, metavar="N", help=text)
    sweep.add_argument(
        "--halving",
        type=int,
        default=0,
        metavar="FACTOR",
        help="stop runs early (successive halving): at the first evaluation, and again after FACTOR times as many "
        "steps, only the best 1/FACTOR by validation loss continue",
    )


def _add_tune(command: AddCommand, spec: Parser, folder: Parser) -> None:
    tuned = command("tune", spec, folder, help="measure which settings of a spec are fastest on this machine")
    add = tuned.add_argument
    limit = "time limit in minutes, without the time in the queue (default: %(default)g)"
    add("--minutes", type=float, default=MINUTES, metavar="N", help=limit)
    add("--allow-changes", action="store_true", help="also try settings that change the result slightly")
    add("--again", action="store_true", help="ignore a saved result and measure again")


def _add_run_commands(command: AddCommand, folder: Parser) -> None:
    """queue, list, annotate, show, stop, resume, retry, logs, and those of _add_report_commands."""
    run_id = Parser(add_help=False, parents=[folder])
    run_id.add_argument("run", metavar="RUN", help=RUN_HELP)
    queue = command("queue", folder, help="list the waiting runs in order, or hold, release or move one")
    queue.add_argument("run", metavar="RUN", nargs="?", help="a waiting run: its ID, a unique prefix, or its name")
    place = queue.add_mutually_exclusive_group()
    place.add_argument("--hold", action="store_true", help="keep the run from starting; later runs may start first")
    place.add_argument("--release", action="store_true", help="end the hold, so that the run can start")
    place.add_argument("--first", action="store_true", help="move the run to the front")
    place.add_argument("--last", action="store_true", help="move the run to the end")
    place.add_argument("--before", metavar="OTHER", help="move the run before another waiting run")
    place.add_argument("--share", action="store_true", help="start the run even if other programs use its GPUs")
    _add_list(command, folder)
    annotate = command("annotate", folder, help="set name, tags, notes, star and archive of runs, or print them")
    annotate.add_argument("run", metavar="RUN", nargs="+", help=RUN_HELP)
    annotate.add_argument("--tag", action="append", default=[], metavar="NAME", help="add a tag; can be repeated")
    annotate.add_argument("--untag", action="append", default=[], metavar="NAME", help="remove a tag; can be repeated")
    annotate.add_argument("--notes", metavar="TEXT", help="replace the notes")
    annotate.add_argument("--name", metavar="NAME", help="rename the run; '' restores its original name")
    for key, words in (("starred", ("star", "unstar")), ("archived", ("archive", "restore"))):
        pair = annotate.add_mutually_exclusive_group()
        for word, value in zip(words, (True, False), strict=True):
            pair.add_argument(f"--{word}", dest=key, action="store_const", const=value, help=f"{word} the runs")
    command("show", run_id, help="print the state, options and results of a run")
    stop = command("stop", run_id, help="stop a run after its current step and save a checkpoint")
    stop.add_argument("--no-save", action="store_true", help="stop without saving a checkpoint")
    resume = command("resume", run_id, help="resume a run from its last complete checkpoint")
    resume.add_argument("--from-scratch", action="store_true", help="start again at step 0; deletes the checkpoints")
    resume.add_argument("--follow", action="store_true", help=FOLLOW)
    retry = command(
        "retry", run_id, help="continue a run that diverged or stopped after a spike, with half the learning rate"
    )
    retry.add_argument("--automatic", action="store_true", help="only if train.half_lr_retries allows another retry")
    retry.add_argument("--follow", action="store_true", help=FOLLOW)
    _add_chat(command, run_id)
    _add_evaluate(command, folder)
    logs = command("logs", run_id, help="print the log of a run")
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing until the run has ended")
    _add_report_commands(command, folder, run_id)


def _add_chat(command: AddCommand, run_id: Parser) -> None:
    chatting = command("chat", run_id, help="chat with the model of a run, and with its base model next to it")
    add = chatting.add_argument
    add("--step", type=int, metavar="N", help=STEP_HELP)
    sides = ("trained", "base", "both")
    add(
        "--models",
        choices=sides,
        default="trained",
        help="the trained model, its base model, or both (default: trained)",
    )
    add("--prompt", metavar="TEXT", help="generate for this prompt and exit (default: read prompts from the terminal)")
    add("--completion", action="append", default=[], metavar="TEXT", help="to score with a reward model; set it twice")
    add("--system", metavar="TEXT", help="the system prompt (default: the one of training)")
    add("--tools", metavar="FILE", help="a JSON file with a list of tool definitions, for templates that read tools")
    add(
        "--chat-template-kwargs",
        default="",
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false} (default: those of training)',
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy decoding (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling: total probability (default: 1)")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="maximum number of new tokens (default: 256)")
    add("--seed", type=int, metavar="N", help="sampling seed (default: random)")


def _add_list(command: AddCommand, folder: Parser) -> None:
    listed = command("list", folder, help="list runs, newest first, with a search, columns and order of your choice")
    add = listed.add_argument
    add("--search", default="", metavar="TEXT", help='only runs that match, such as "state:failed tag:paper lr>1e-4"')
    add("--columns", default="", metavar="NAMES", help="columns of a table: loss,eval_loss,lr,tags")
    add("--sort", default="", metavar="COLUMN", help="sort by a column, the lowest value first")
    add("--reverse", action="store_true", help="the highest value first, or the oldest run")
    add("--sweep", default="", metavar="SWEEP", help="the runs of one sweep, best first")
    ranking = "with --sweep: rank by a score, such as exact_match or evaluation.exact_match (default: eval_loss)"
    add("--by", default="", metavar="SCORE", help=ranking)


def _add_evaluate(command: AddCommand, folder: Parser) -> None:
    compares = "compare the model of a run with its base model on the same examples, or several runs with the first one"
    evaluating = command("evaluate", folder, help=compares)
    add = evaluating.add_argument
    add("run", metavar="RUN", nargs="+", help=RUN_HELP)
    add("--step", type=int, metavar="N", help=STEP_HELP)
    add("--data", default="", metavar="FILE", help="a data file (default: the validation examples of the run)")
    add("--examples", type=int, default=100, metavar="N", help="maximum number of examples; 0: none (default: 100)")
    add("--max-new-tokens", type=int, metavar="N", help="maximum per output (default: eval.max_new_tokens of the run)")
    add("--no-general-texts", action="store_true", help="skip the general texts, which measure forgetting")
    samples = "outputs per prompt and model (default: 1); above 1, needs --temperature and adds pass@1 and pass@N"
    add("--samples-per-prompt", type=int, default=1, metavar="N", help=samples)
    add("--temperature", type=float, default=0.0, metavar="T", help="0 generates greedily (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling: total probability (default: 1)")
    add("--pass-at-k", type=int, default=0, metavar="K", help="also compute pass@K, with K between 1 and N")
    add("--regex", default="", metavar="PATTERN", help="add a score: whether an output matches a regular expression")
    group = "score 1 if the first group of --regex is the same in output and reference, instead of for any match"
    add("--regex-group", action="store_true", help=group)
    function = "add a score: the function score(prompt, reference, output) of a Python file"
    add("--score-file", default="", metavar="FILE", help=function)
    add("--with-code", action="store_true", help="agree to run the code of --score-file with your permissions")
    judge = "add a score: an LLM judge at this base URL of an OpenAI-compatible API compares the outputs"
    add("--judge", default="", metavar="URL", help=judge)
    add("--judge-model", default="", metavar="NAME", help="the name of the judge's model")
    add("--judge-key", default="", metavar="VARIABLE", help="variable with the judge's API key (default: none)")
    criteria = "the judge's criteria (default: the prompt is followed; correct, complete and clear)"
    add("--judge-instruction", default="", metavar="TEXT", help=criteria)
    add("--send-outputs", action="store_true", help="agree to send prompts, references and outputs to --judge")


def _add_benchmark(command: AddCommand, run_id: Parser) -> None:
    measuring = command("benchmark", run_id, help="measure the model of a run and its base model on tasks of lm-eval")
    add, switch = measuring.add_argument, argparse.BooleanOptionalAction
    names = "comma-separated names of tasks, such as arc_easy, or YAML files"
    add("--tasks", required=True, metavar="TASKS", help=names)
    add("--step", type=int, metavar="N", help=STEP_HELP)
    add("--limit", type=int, default=LIMIT, metavar="N", help="samples of each task; 0: all (default: %(default)s)")
    add("--shots", type=int, metavar="N", help="few-shot examples per prompt (default: set by the task)")
    add("--base", action=switch, default=True, help="measure the base model too (default: yes)")
    add("--chat-template", action=switch, help="apply the chat template (default: as in training)")
    add("--allow-code", action="store_true", help="run code that tasks contain and code that models write")


def _add_report_commands(command: AddCommand, folder: Parser, run_id: Parser) -> None:
    """benchmark, merge, export-model, serve, publish, metrics, export-metrics, stacks, bundle,
    report-measurement."""
    _add_benchmark(command, run_id)
    merged = command("merge", run_id, help="merge the adapter of a run into its base model, and check the result")
    merged.add_argument("--step", type=int, metavar="N", help=STEP_HELP)
    _add_publish(command, run_id)
    model = command(
        "export-model", run_id, help="export the model of a run as GGUF or as a quantized checkpoint, and check it"
    )
    model.add_argument("--step", type=int, metavar="N", help=STEP_HELP)
    formats = (*FORMATS, *quantized.FORMATS)
    model.add_argument("--format", choices=formats, default=DEFAULT, help="format of the export (default: %(default)s)")
    _add_serve(command, run_id)
    command("metrics", run_id, help="print the logged metrics of a run")
    exported = command("export-metrics", folder, help="write the metrics of runs for TensorBoard or trackio")
    exported.add_argument("run", metavar="RUN", nargs="+", help=RUN_HELP)
    exported.add_argument("--to", choices=export_metrics.FOLDERS, required=True, help="the package that shows them")
    exported.add_argument("--out", default="", metavar="FOLDER", help="where (default: tensorboard-logs, trackio-logs)")
    command("stacks", run_id, help="print what each rank of a running run is doing: for a run without progress")
    bundled = command("bundle", run_id, help="write a zip file for a bug report: options, versions and log, no secrets")
    bundled.add_argument("--output", default="", metavar="FILE", help="the zip file (default: RUN-bundle.zip)")
    reported = command(
        "report-measurement",
        run_id,
        help="print and write an anonymous report of memory and time, predicted and measured",
    )
    reported.add_argument(
        "--output", default="", metavar="FILE", help=f"a new JSON file (default: {report_measurement.FILE})"
    )


def _add_serve(command: AddCommand, run_id: Parser) -> None:
    served = command("serve", run_id, help="serve a model of a run with an OpenAI-compatible API: llama.cpp or vLLM")
    add = served.add_argument
    engine = "default: llama.cpp if the run has a GGUF file or vLLM is not installed, otherwise vllm"
    add("--engine", choices=(LLAMA_CPP, VLLM), default="", help=engine)
    add("--port", type=int, default=0, metavar="N", help="port of 127.0.0.1 (default: a free one)")
    context = "max tokens of a prompt and its output (default: llama.cpp up to 4096, vLLM as many as fit into memory)"
    add("--context", type=int, default=0, metavar="N", help=context)
    parallel = "concurrent requests (default: llama.cpp 1, vLLM its own default)"
    add("--parallel", type=int, default=0, metavar="N", help=parallel)
    add("--token-file", default="", metavar="FILE", help="your API token, in a file that only you can read")
    add("--background", action="store_true", help="exit once the server answers; `footplate stop FOLDER` ends it")
    add = served.add_argument_group("llama.cpp, on the CPU").add_argument
    add("--file", default="", metavar="FILE", help="name or path of the GGUF file (default: the newest of the run)")
    add("--format", choices=tuple(FORMATS), default="", help="the newest file of this format (default: any)")
    threads = "CPU threads (default: 1, which leaves the cores to training runs)"
    add("--threads", type=int, default=1, metavar="N", help=threads)
    add = served.add_argument_group("vLLM, on NVIDIA GPUs", "Untested on a GPU.").add_argument
    add("--step", type=int, metavar="N", help=STEP_HELP)
    add("--merged", action="store_true", help="the merged model (of `footplate merge`) instead of the adapter")
    add("--dtype", choices=SERVE_DTYPES, default="auto", help="compute dtype (default: auto, as in training)")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs to split the model over (default: 1)")
    memory = "fraction of each GPU's memory that vLLM may use (default: %(default)s)"
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="F", help=memory)


def _add_publish(command: AddCommand, run_id: Parser) -> None:
    published = command("publish", run_id, help="publish the model of a run on the Hugging Face Hub, or in a folder")
    add = published.add_argument
    place = published.add_mutually_exclusive_group(required=True)
    place.add_argument("--to", metavar="REPOSITORY", help="a repository of the Hub: account/name, or name")
    place.add_argument("--folder", metavar="DIR", help="a folder that is empty or does not exist")
    add("--step", type=int, metavar="N", help=STEP_HELP)
    add("--merged", action="store_true", help="the merged model (of `footplate merge`) instead of the adapter")
    add(
        "--format", action="append", default=[], choices=(*FORMATS, *quantized.FORMATS), metavar="FORMAT",
        help="an export (of `footplate export-model`) instead of the model: a quantized checkpoint, or a GGUF file; "
        "repeat it for several GGUF files",
    )  # fmt: skip
    add("--public", action="store_true", help="a public repository (default: private)")
    add("--license", default="", metavar="ID", help="license of the model card, such as apache-2.0 (default: none)")
    add("--base-model", default="", metavar="ID", help="Hub ID of the base model, if the run used a local folder")
    add("--dry-run", action="store_true", help="print what would be published, with the model card, and exit")
    add("--yes", action="store_true", help="publish without asking")


if __name__ == "__main__":
    sys.exit(main())
