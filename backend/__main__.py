"""The shell: `footplate check|plan|estimate|run|list|show|stop|resume|logs|metrics|presets|rules|docs|ui`.

Floor 5. Imports: below. Walks the same way as the page, without it. With --json stdout is one JSON document and
nothing else. Exit codes: `check` 0 without error findings, 1 with, 2 if SPEC is no RunSpec; `run --follow` 0 done,
1 failed, 3 stopped; 2 for anything that cannot be read or found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from backend.cli import commands, runs
from backend.config.options import SpecError
from backend.runs.folder import RunError

Command = Callable[[argparse.Namespace], int]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Bad input is a sentence on stderr and code 2, never a traceback."""
    arguments = parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except SpecError as error:
        for problem in error.problems:
            print(f"{problem.field}: {problem.message}" if problem.field else problem.message, file=sys.stderr)
    except RunError as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130
    return 2


COMMANDS: Mapping[str, Command] = {
    "check": commands.check,
    "plan": commands.plan,
    "estimate": commands.estimate,
    "run": runs.run,
    "list": runs.list_runs,
    "show": runs.show,
    "stop": runs.stop,
    "resume": runs.resume,
    "logs": runs.logs,
    "metrics": runs.metrics,
    "presets": commands.presets,
    "rules": commands.rules,
    "docs": commands.docs,
    "ui": commands.ui,
}


def parser() -> argparse.ArgumentParser:
    """Every command with its arguments."""
    top = argparse.ArgumentParser(
        prog="footplate", description="Fine-tuning from the shell; `footplate ui` is the page."
    )
    subcommands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    json_too = argparse.ArgumentParser(add_help=False)
    json_too.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    spec = argparse.ArgumentParser(add_help=False)
    spec.add_argument("spec", metavar="SPEC", help="a YAML file, or a preset's name")
    spec.add_argument("--set", action="append", default=[], metavar="section.field=value", help="change one option")
    machine = argparse.ArgumentParser(add_help=False)
    machine.add_argument(
        "--machine", metavar="NAME", help="a machine of presets/machines, or one described in YAML; this one by default"
    )
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--runs", default="runs", metavar="DIR", help="where runs are kept (default: runs)")
    one = argparse.ArgumentParser(add_help=False, parents=[where])
    one.add_argument("run", metavar="RUN", help="a run's id, the beginning of one, or its folder")

    subcommands.add_parser("check", parents=[spec, machine, json_too], help="what cannot work, and what would")
    plan = subcommands.add_parser("plan", parents=[spec, machine, json_too], help="the command, to the letter")
    plan.add_argument("--launcher", choices=commands.launchers(), help="instead of the launcher in SPEC")
    subcommands.add_parser("estimate", parents=[spec, machine, json_too], help="memory, row by row")
    run = subcommands.add_parser("run", parents=[spec, where, json_too], help="start a run")
    run.add_argument("--follow", action="store_true", help="stream the log; exit with the run's outcome")
    run.add_argument("--skip-checks", action="store_true", help="start in spite of error findings")
    subcommands.add_parser("list", parents=[where, json_too], help="all runs, newest first")
    subcommands.add_parser("show", parents=[one, json_too], help="one run")
    stop = subcommands.add_parser("stop", parents=[one, json_too], help="stop a run, with a checkpoint")
    stop.add_argument("--no-save", action="store_true", help="without a checkpoint")
    resume = subcommands.add_parser("resume", parents=[one, json_too], help="go on from the last complete checkpoint")
    resume.add_argument("--anew", action="store_true", help="begin at step 0 instead")
    resume.add_argument("--follow", action="store_true", help="stream the log; exit with the run's outcome")
    logs = subcommands.add_parser("logs", parents=[one, json_too], help="a run's log")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    subcommands.add_parser("metrics", parents=[one, json_too], help="a run's points")
    subcommands.add_parser("presets", parents=[json_too], help="starting points")
    subcommands.add_parser("rules", parents=[json_too], help="the catalogue of rules")
    subcommands.add_parser("docs", parents=[json_too], help="write docs/options.md and docs/rules.md")
    ui = subcommands.add_parser("ui", parents=[where], help="the page")
    ui.add_argument("--host", default="127.0.0.1")
    ui.add_argument("--port", type=int, default=7860)
    return top


if __name__ == "__main__":
    sys.exit(main())
