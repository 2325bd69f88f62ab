"""Writes docs/exports.md: which adapters can be merged after which strategies, and which architectures llama.cpp runs.

Every cell is a run that was trained, and merged or exported by the job that a user starts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from architectures import Sizes, build
from fork_server import ForkServer
from report_files import read_sections, table, write_section
from training_runs import ignore_progress, make_spec
from transformers import GenerationConfig

from backend import environments, paths
from backend.export.gguf import GgufExport
from backend.export.merge import Merge
from backend.models import gguf
from backend.paths import HOME
from backend.preflight import preflight
from backend.presets import machines
from backend.runs import JOBS, RESULT, jobs
from backend.runs.folder import Run
from backend.train import builtin_models
from backend.train.run_log import RunLog, TrainError

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]
DOCUMENT = HOME / "docs/exports.md"
TRAINED = {"train.learning_rate": 2e-2, "train.max_steps": 4, "save.final_model": True}
TWO = {"launch.nproc_per_node": 2, "train.per_device_train_batch_size": 1}
NF4, INT8 = ({"method.quantization": name} for name in ("nf4", "int8"))
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {},
    "LoRA, all linear layers and embeddings": {"lora.modules_to_save": ("embed_tokens", "lm_head")},
    "rsLoRA": {"lora.use_rslora": True},
    "DoRA": {"lora.use_dora": True},
    "PiSSA": {"lora.init": "pissa"},
    "OLoRA": {"lora.init": "olora"},
    "Orthogonal": {"lora.init": "orthogonal"},
}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "1 process": {},
    "1 process, NF4": NF4,
    "1 process, int8": INT8,
    "DDP": {"parallel.strategy": "ddp", **TWO},
    "ZeRO-2": {"parallel.strategy": "zero2", **TWO},
    "ZeRO-3": {"parallel.strategy": "zero3", **TWO},
    "FSDP2": {"parallel.strategy": "fsdp2", **TWO},
    "FSDP2, NF4": {"parallel.strategy": "fsdp2", **TWO, **NF4},
}
TYPES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
    "granite", "granitemoe", "olmo2", "olmoe", "smollm3", "stablelm", "starcoder2", "gpt2", "gpt_neox", "falcon", "opt",
    "cohere2", "glm4", "exaone4", "ernie4_5", "seed_oss", "deepseek_v3", "gpt_oss", "lfm2", "mamba",
)  # fmt: skip
VERIFIED = {
    "llama", "mistral", "mixtral", "qwen3", "qwen2_moe", "granite", "granitemoe", "olmo2", "olmoe", "smollm3",
    "stablelm", "starcoder2", "gpt2", "cohere2", "seed_oss", "deepseek_v3", "gpt_oss", "lfm2",
}  # fmt: skip
# Keys of published files that transformers 5 does not write.
PUBLISHED = {"gpt2": {"n_ctx": 512}, "cohere2": {"rotary_pct": 1.0}}
FORMATS = [name for name, format in gguf.OF_MODEL.items() if not format.larger]  # k-quants need rows of 256 elements
MERGES, FILES = "Merging an adapter", "GGUF files"
TITLES = (MERGES, FILES, "Quantized checkpoints")  # the last one is written by hand
SMOLLM2 = "smollm2-135m-instruct"
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
ROUNDING = 1e-9  # smaller divergences of fp32 are rounding
REFUSED = "llama.cpp's converter cannot convert this model: "
SHOWN = 160  # characters of a reason
ABOUT_MERGES = (
    "Each cell: the mean Kullback-Leibler divergence from the trained model to the merged one, and the divergence from "
    "the trained model to its base model, which is what training changed, in nats per token."
)
ABOUT_FILES = (
    "Each cell: what the certificate of the file says, and the mean divergence from the trained model to the file in "
    "llama.cpp, in nats per token; or why there is no file. The tokenizer is that of SmolLM2, which llama.cpp's "
    "converter does not accept for every model type. llama.cpp may also not support sizes that only such tiny models "
    "have, which is why a model type that differs here may be right in the sizes that are published."
)
INTRODUCTION = """\
# Merged models, GGUF files and quantized checkpoints

The first two sections are written by `make soak PART=export_tables` on a CPU, with tiny models that have random
weights: each cell is a run that was trained for 4 steps, and then merged or exported as a user would do it. A rule code
is the rule that refuses the run before it starts.
"""


def section(title: str, text: str, columns: Sequence[str], name: str, cells: Sequence[str]) -> None:
    """Write or replace the row `name` of a section's table."""
    known = read_sections(DOCUMENT).get(title, "")
    lines = {line[2:].partition(" | ")[0]: line for line in known.splitlines() if line.startswith("| ")}
    lines[name] = table([name, *cells], []).splitlines()[0]
    order = [each for each in (*ADAPTERS, *TYPES) if each in lines]
    body = "\n".join([text, "", table(columns, []), *(lines[each] for each in order)])
    write_section(DOCUMENT, lambda _: INTRODUCTION, TITLES, title, body)


def refusal(changes: Mapping[str, Any]) -> str:
    """The codes of the rules that refuse a run; '' if none does."""
    report = preflight(make_spec(changes), machines()["laptop"], HOME, 60)
    return ", ".join(f"[{code}](rules.md)" for code in sorted({f.code for f in report.findings if f.level == "error"}))


def shown(divergence: float) -> str:
    return (
        f"{divergence:.0e}".replace("e-0", "e-") if divergence > ROUNDING else f"<{ROUNDING:.0e}".replace("e-0", "e-")
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_merges(fork_server: ForkServer, root: Path, adapter: str) -> None:
    cells = []
    for strategy, changes in STRATEGIES.items():
        changes = {**TRAINED, **ADAPTERS[adapter], **changes}
        if codes := refusal(changes):
            cells.append(codes)
            continue
        run = fork_server.train(
            root / f"{adapter} {strategy}", make_spec(changes), int(changes.get("launch.nproc_per_node", 0))
        )
        (target := run / "merged").mkdir()
        certificate = Merge(Run(run), None, target, RunLog(target)).run_all()["certificate"]
        left, changed = (certificate[name]["kl_mean"] for name in ("adapter_to_merged_fp32", "adapter_to_base"))
        cells.append(f"{shown(left)} of {changed:.2g}")
        shutil.rmtree(run)
    section(MERGES, ABOUT_MERGES, ["adapter", *STRATEGIES], adapter, cells)


@pytest.fixture(scope="module")
def environment(cache: Path) -> Path:
    return environments.create("gguf", lambda line: None)


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Path:
    """The folder of a model whose tokenizer llama.cpp knows."""
    if (known := paths.model_folder(SMOLLM2, {})).is_dir():  # so that it is not downloaded again
        (cache / "models" / SMOLLM2).symlink_to(known)
    return Path(builtin_models.prepare(SMOLLM2, ignore_progress))


@pytest.mark.parametrize("kind", TYPES)
def test_architectures_in_llama_cpp(
    fork_server: ForkServer, root: Path, environment: Path, smollm2: Path, kind: str
) -> None:
    base = root / f"base-{kind}"
    model = build(kind, Sizes(vocabulary=49152, layers=2))
    vars(model.config).update(TOKENS)
    model.generation_config = GenerationConfig(**TOKENS)
    model.save_pretrained(base)
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **PUBLISHED.get(kind, {})}))
    for path in smollm2.iterdir():
        if not path.name.startswith(("config", "generation", "model")):
            shutil.copy(path, base)
    changes = {"model.source": "path", "model.path": str(base), "method.kind": "full", "train.learning_rate": 1e-3}
    run = Run(fork_server.train(root / f"gguf-{kind}", make_spec({**TRAINED, **changes})))
    cells = [exported(run, environment, each) for each in FORMATS]
    section(FILES, ABOUT_FILES, ["model type", *FORMATS], kind, cells)
    assert kind not in VERIFIED or all(cell.startswith("verified") for cell in cells)
    shutil.rmtree(run.path)


def exported(run: Run, environment: Path, format: str) -> str:
    """What the certificate of a file says, or why there is no file."""
    (job := run.path / JOBS / format).mkdir(parents=True)
    request = {"step": None, "format": format, "merge": "", "environment": str(environment)}
    (job / jobs.request_file(jobs.GGUF)).write_text(json.dumps(request))
    try:
        certificate = GgufExport(run, job, RunLog(job)).run_all()["certificate"]
    except TrainError as error:
        if not (job / RESULT).exists():
            return cut(str(error).removeprefix(REFUSED))
        certificate = json.loads((job / RESULT).read_text())["certificate"]
    text = f"{certificate['status']}, {shown(certificate['trained_to_file']['kl_mean'])}"
    return cut("; ".join([text, *certificate["differences"][:1]]))


def cut(text: str) -> str:
    """The first sentence, for a cell."""
    first = text.partition(". ")[0].rstrip(".").replace("|", "\\|")
    return first if len(first) <= SHOWN else f"{first[:SHOWN]}…"
