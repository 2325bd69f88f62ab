"""`python -m backend.train.worker`: answers the inspection's requests that need torch, transformers or a tokenizer.

Requests come on stdin and responses go to stdout, one JSON object per line: {"id": ..., "architecture":
{...config.json}}, {"id": ..., "cpu": {...the request of measure_cpu}} or {"id": ..., "examples": {...}}, which has the
position "first" if some of them are to be shown, and {"id": ..., "result": {...}} or {"id": ..., "error": "reason"};
before the result of examples, any number of {"id": ..., "progress": {...the result so far}}. A request that arrives
during another one ends the other one. The process ends when stdin closes, when its parent process ends, when it takes
too much memory, or after --idle seconds without a request.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any, TextIO

import psutil
import transformers

from backend import registry
from backend.inspect.worker import MAX_BYTES, TOO_LARGE
from backend.train import describe_model

NICENESS = 10  # while examples are tokenized, which can take minutes: a training run on the same cores comes first


class _Superseded(Exception):
    """The client has sent another request."""


def serve(idle: float) -> None:
    """Answer requests until stdin closes, the parent ends, or nothing comes for `idle` seconds."""
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be mixed with the responses
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, requests), daemon=True).start()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    _send(responses, {"ready": os.getpid(), "transformers": transformers.__version__})
    while True:
        try:
            line = requests.get(timeout=idle)
        except queue.Empty:
            return
        _send(responses, _respond(line, responses, requests))


def _read(source: TextIO, requests: queue.SimpleQueue[str]) -> None:
    """Queue each line. End of input ends the process at once, also while a request is processed."""
    for line in source:
        requests.put(line)
    os._exit(0)


def _watch(parent: int) -> None:
    """End the process when its parent is gone or when it takes too much memory."""
    process = psutil.Process()
    while True:
        time.sleep(0.25)
        if os.getppid() != parent:
            os._exit(0)
        if process.memory_info().rss > MAX_BYTES:
            os._exit(TOO_LARGE)


def _respond(line: str, responses: TextIO, requests: queue.SimpleQueue[str]) -> dict[str, Any]:
    number: Any = None

    def send_progress(progress: Mapping[str, Any]) -> None:
        if not requests.empty():
            raise _Superseded
        _send(responses, {"id": number, "progress": progress})

    try:
        request = json.loads(line)
        number = request["id"]
        if "examples" in request:
            # Imported here: it takes seconds more, and most requests are about architectures.
            from backend.train import show_examples, tokenize_examples  # noqa: PLC0415

            if "first" in request["examples"]:
                return {"id": number, "result": show_examples.show(**request["examples"])}
            os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
            return {"id": number, "result": tokenize_examples.inspect(**request["examples"], report=send_progress)}
        if "cpu" in request:
            from backend.train import measure_cpu  # noqa: PLC0415 - takes a second

            return {"id": number, "result": measure_cpu.measure(request["cpu"])}
        return {"id": number, "result": describe_model.describe(request["architecture"])}
    except _Superseded:
        return {"id": number, "error": "another request came"}
    except describe_model.Refused as error:
        return {"id": number, "error": str(error)}
    except MemoryError as error:
        reason = str(error) or "building the model"
        return {"id": number, "error": f"{reason} takes too much CPU memory (more than {MAX_BYTES // 2**30} GiB)"}
    except Exception as error:  # whatever a request causes, the next one must be served
        return {"id": number, "error": describe_model.first_line(error)}


def _send(responses: TextIO, value: Mapping[str, Any]) -> None:
    responses.write(json.dumps(value, separators=(",", ":")) + "\n")
    responses.flush()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(prog="python -m backend.train.worker", description="Answer inspection requests.")
    parser.add_argument(
        "--idle", type=float, default=600, help="seconds without a request until the process ends (default: 600)"
    )
    given = parser.parse_args()
    os.environ.update(registry.NO_GPUS)  # read when CUDA starts, which takes memory of a device
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    serve(given.idle)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread still waits for stdin
