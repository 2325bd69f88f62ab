"""Preparing the same conversations with Footplate and with LLaMA-Factory: speed, CPU time, and memory of all processes.

Needs `footplate env create llamafactory`. Each measurement has its own process; the programs take turns, and import
their libraries before the clock starts. LLaMA-Factory uses its template chatml, and two processes as Footplate does.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from backend.environments import is_complete
from backend.paths import environment_folder, model_folder
from tests.bench import preparing
from tests.bench.preparing import Measurement

PROCESSES, TIMES = 2, 5
REPORT = """
def report(prepare):
    import json, os, time
    found = []
    for turn in ("cold", "cached"):
        began, before = time.perf_counter(), os.times()
        tokens = prepare(turn)
        cpu = sum(after - first for after, first in zip(os.times()[:4], before[:4]))
        found.append([time.perf_counter() - began, cpu, tokens])
    print(json.dumps(found))
"""
FOOTPLATE = """
import sys
from pathlib import Path
import pyarrow.compute as pc
from backend.config import RunSpec
from backend.config.options import edit
from backend.train import data, model
path, folder, processes, made = sys.argv[1:]
spec = edit(RunSpec(), {"model.builtin": "smollm2-135m-instruct", "data.source": "files", "data.files": (path,),
                        "data.max_length": 2048, "data.dataset_num_proc": int(processes), "data.validation": "none",
                        "eval.strategy": "no"})
tokenizer = model.load_tokenizer(spec, model.ModelSource(made, {"local_files_only": True}))
def prepare(turn):
    data.prepare_once(spec, tokenizer, lambda done, of: True, lambda line: None, Path(folder) / turn, 0.0)
    return pc.sum(pc.list_value_length(data.load(Path(folder) / turn).train.data.column("input_ids"))).as_py()
report(prepare)
"""
LLAMAFACTORY = """
import json, sys
from pathlib import Path
import pyarrow.compute as pc
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
path, folder, processes, made = sys.argv[1:]
about = {"file_name": path, "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}}
(Path(folder) / "dataset_info.json").write_text(json.dumps({"conversations": about}))
models, files, training, *_ = get_train_args({
    "model_name_or_path": made, "stage": "sft", "do_train": True, "finetuning_type": "lora", "template": "chatml",
    "dataset": "conversations", "dataset_dir": folder, "cutoff_len": 2048, "output_dir": f"{folder}/out",
    "preprocessing_num_workers": int(processes), "report_to": "none"})
loaded = load_tokenizer(models)
template = get_template_and_fix_tokenizer(loaded["tokenizer"], files)
def prepare(turn):
    made = get_dataset(template, models, files, training, stage="sft", **loaded)["train_dataset"]
    return pc.sum(pc.list_value_length(made.data.column("input_ids"))).as_py()
report(prepare)
"""


def measure(folder: Path) -> Iterator[Measurement]:
    """With 10,000 and 100,000 conversations of about 350 tokens; with LARGE=1 also a million."""
    if not is_complete("llamafactory"):
        print("  not measured: footplate env create llamafactory")
        return
    counts = [int(n) for n in os.environ.get("EXAMPLES", "10000 100000").split()]
    for count in counts + [1_000_000] * bool(os.environ.get("LARGE")):
        path = folder / f"{count}.jsonl"
        if not path.exists():
            preparing._write(path, count)
        found = [_turn(path, folder / f"peers-{count}-{n}") for n in range(TIMES if count <= 10_000 else 1)]
        for name in found[0]:
            runs = [turn[name] for turn in found]
            yield f"{name}, {count:,} examples", [count / cold[0] for (cold, _), _ in runs], "examples/s"
            yield "  tokens", [cold[2] / cold[0] for (cold, _), _ in runs], "tokens/s"
            yield "  CPU time per example", [1000 * cold[1] / count for (cold, _), _ in runs], "ms"
            yield "  memory of all its processes", [peak for _, peak in runs], "MiB"
            yield "  from the cache", [cached[0] for (_, cached), _ in runs], "s"
        yield "ratio of examples/s", [each["LLaMA-Factory"][0][0][0] / each["Footplate"][0][0][0] for each in found], ""


def _turn(path: Path, folder: Path) -> dict[str, tuple[list[list[float]], float]]:
    """Of each program: seconds, CPU seconds and tokens, cold and cached, and the peak of its memory in MiB."""
    programs = {
        "Footplate": (sys.executable, FOOTPLATE),
        "LLaMA-Factory": (str(environment_folder("llamafactory") / "bin/python"), LLAMAFACTORY),
    }
    return {name: _run(*program, path, folder / name) for name, program in programs.items()}


def _run(python: str, code: str, path: Path, folder: Path) -> tuple[list[list[float]], float]:
    (folder / "cache").mkdir(parents=True)
    own = {"FOOTPLATE_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    variables = {**os.environ, **own, "TOKENIZERS_PARALLELISM": "false", "DISABLE_VERSION_CHECK": "1"}
    model = model_folder("smollm2-135m-instruct")
    command = [python, "-c", REPORT + code, str(path), str(folder), str(PROCESSES), str(model)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        peak, done = [0.0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
        watcher.start()
        output, errors = process.communicate()
        done.set()
        watcher.join()
    if process.returncode:
        raise RuntimeError(errors[-2000:])
    return json.loads(output.splitlines()[-1]), peak[0]


def _watch(pid: int, peak: list[float], done: threading.Event) -> None:
    """Keep the largest sum of the processes' memory in `peak`; pages that they share count once."""
    while not done.wait(0.2):
        try:
            root = psutil.Process(pid)
            tree = [root, *root.children(recursive=True)]
            peak[0] = max(peak[0], sum(each.memory_full_info().pss for each in tree) / 2**20)
        except psutil.Error:  # one has ended meanwhile
            continue
