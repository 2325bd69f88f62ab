"""Preparing data: examples per second, compared with the tokenizer alone, memory, and the time from the cache.

The model is SmolLM2 135M Instruct, whose template marks no completions. Each measurement has its own process.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

Measurement = tuple[str, list[float], str]
TIMES = 3
WORDS = [
    "train",
    "station",
    "platform",
    "from",
    "Bern",
    "to",
    "Basel",
    "at",
    "nine",
    "and",
    "seven",
    "leaves",
    "arrives",
    "the",
    "of",
    "a",
    "late",
    "early",
]
MEASURE = """
import json, resource, sys, time
from pathlib import Path
from backend import presets
from backend.config.options import edit
from backend.config import RunSpec
from backend.train import builtin_models, data, model

path, folder, processes = sys.argv[1:]
name = "smollm2-135m-instruct"
spec = edit(RunSpec(), {"model.builtin": name, "data.source": "files", "data.files": (path,), "data.max_length": 2048,
                        "data.dataset_num_proc": int(processes)})
made = builtin_models.prepare(name, lambda *_: None)
tokenizer = model.load_tokenizer(spec, model.ModelSource(str(made), {"local_files_only": True}))
chat = data.ChatTokenizer.create(tokenizer, False)
texts = [chat.render(json.loads(row)["messages"], {}) for _, row in zip(range(2000), open(path))]
began = time.perf_counter()
tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
alone = (time.perf_counter() - began) / len(texts)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = []
for turn in ("first", "again"):
    began = time.perf_counter()
    data.prepare_once(spec, tokenizer, lambda done, of: True, lambda line: None, Path(folder) / turn, 0.0)
    data.load(Path(folder) / turn)
    seconds.append(time.perf_counter() - began)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([seconds, alone, peak / 1024]))
"""


def measure(folder: Path) -> Iterator[Measurement]:
    """With 10,000 and 100,000 conversations of about 350 tokens; with LARGE=1 also a million."""
    cases = [(10_000, 1, TIMES), (10_000, 2, TIMES), (100_000, 2, 1)]
    if os.environ.get("LARGE"):
        cases.append((1_000_000, 2, 1))
    for count, processes, times in cases:
        path = folder / f"{count}.jsonl"
        if not path.exists():
            _write(path, count)
        found = [_run(path, folder / f"{count}-{processes}-{turn}", processes) for turn in range(times)]
        what = f"{count:,} examples, {processes} process{'es' if processes > 1 else ''}"
        yield what, [count / seconds[0] for seconds, _, _ in found], "examples/s"
        yield "  share of the tokenizer's own speed", [count * alone / seconds[0] for seconds, alone, _ in found], ""
        yield "  memory above that of the libraries", [peak for _, _, peak in found], "MiB"
        yield "  from the cache", [seconds[1] for seconds, _, _ in found], "s"


def _write(path: Path, count: int) -> None:
    drawn = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            texts = [" ".join(drawn.choices(WORDS, k=size)) for size in (60, 90, 60, 90)]
            texts[0] += f" {number}"
            roles = ("user", "assistant", "user", "assistant")
            turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")


def _run(path: Path, folder: Path, processes: int) -> tuple[list[float], float, float]:
    (folder / "cache").mkdir(parents=True)
    models = Path(os.environ.get("FOOTPLATE_CACHE") or Path.home() / ".cache/footplate") / "models"
    (folder / "cache/models").symlink_to(models)
    variables = {**os.environ, "FOOTPLATE_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", MEASURE, str(path), str(folder), str(processes)]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))
