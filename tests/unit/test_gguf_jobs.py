"""Starting to export as GGUF: what is refused, with the way to fix it, and which export belongs to a model."""

import json
from pathlib import Path

import pytest
from failed_runs import ended, planted_run

from backend import environments
from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.models import gguf, merge, trained
from backend.models.gguf import FOLDER
from backend.runs import LOCK, RESULT, jobs
from backend.runs.folder import Run, RunError

BASE = {"base_model_name_or_path": "tiny-llama", "peft_type": "LORA"}


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Makes runs that have finished, with full weights or an adapter; no job is started."""
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Run, "start", lambda self, timeouts: None)

    def make(is_adapter=False, **changes):
        run = planted_run(tmp_path / "runs", edit(RunSpec(), changes), probe(Path.cwd()), "run")
        write(run.path / "model", **({"adapter_config.json": BASE} if is_adapter else {"config.json": {}}))
        ended(run, end="done", exit_code=0)
        (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
        return run

    return make


def write(folder, **files):
    folder.mkdir(parents=True)
    weights = "adapter_model.safetensors" if "adapter_config.json" in files else "model.safetensors"
    for name, content in {**files, "tokenizer_config.json": {}, weights: {}}.items():
        (folder / name).write_text(json.dumps(content))


def create_environment():
    folder = environments.environment_folder("gguf")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / environments.COMPLETE).touch()


def test_what_is_refused(plant, capsys):
    run = plant()
    with pytest.raises(RunError, match="Run `footplate env create gguf`"):
        gguf.start(run, None, "q8_0")
    environments.environment_folder("gguf").mkdir(parents=True)  # as an interrupted creation leaves it
    assert "are not installed. Run `footplate env create gguf`, which" in gguf.missing()
    assert main(["export-model", "--runs", str(run.path.parent), run.id]) == 2
    assert "`footplate env create gguf`" in capsys.readouterr().err
    with pytest.raises(RunError, match="Choose one of q8_0, q6_k, q5_k_m, q4_k_m, f16, bf16, lora-q8_0"):
        gguf.start(run, None, "q2_k")
    with pytest.raises(RunError, match="no weights of checkpoint 7"):
        gguf.start(run, 7, "q8_0")
    with pytest.raises(RunError, match="Reward models cannot be exported"):
        gguf.start(plant(**{"train.stage": "reward"}), None, "q8_0")


def test_an_adapter_has_to_be_merged_first(plant):
    run = plant(is_adapter=True)
    create_environment()
    assert not gguf.missing()
    with pytest.raises(RunError, match=rf"`footplate merge {run.id}`, or Merge into base model"):
        gguf.start(run, None, "q8_0")
    job = jobs.create(run, jobs.MERGE, {"step": None}, {}, {})
    finished(job, {"model": "model"})
    write(job.path / "model", **{"config.json": {}})
    request = json.loads((gguf.start(run, None, "q8_0").path / "gguf.json").read_text())
    environment = str(environments.environment_folder("gguf"))
    assert request == {"step": None, "format": "q8_0", "merge": job.id, "environment": environment}


def test_an_export_finds_the_base_model_where_training_found_it(plant):
    """A merge and the export of an adapter load it, from the cache or the endpoint that launch.env sets."""
    own = {"HF_HOME": "/data/hub", "HF_ENDPOINT": "https://hub.example", "OMP_NUM_THREADS": "7", "PYTHONPATH": "/mine"}
    run = plant(is_adapter=True, **{"launch.env": own})
    env = merge.start(run, None).plan().env
    assert (env["HF_HOME"], env["HF_ENDPOINT"]) == ("/data/hub", "https://hub.example")
    assert env["OMP_NUM_THREADS"] == "1" and env["CUDA_VISIBLE_DEVICES"] == "" and env["PYTHONPATH"] != "/mine"


LORA = ("q_proj.lora_A.weight", "q_proj.lora_B.weight")
ADAPTERS = {  # tensors and keys of adapter_config.json -> what is named
    "plain": (LORA, {"use_rslora": True}, ""),
    "dora": (LORA, {"use_dora": True}, "DoRA magnitude vectors"),
    "bias": (LORA, {"bias": "lora_only"}, r"trained biases \(bias=lora_only\)"),
    "modules": (LORA, {"modules_to_save": ["norm"]}, r"trained in full \(lora.modules_to_save\)"),
    "tokens": (LORA, {"trainable_token_indices": [7]}, "embeddings of added tokens"),
    "experts": (LORA, {"target_parameters": ["experts.gate_up_proj"]}, "stacked experts"),
    "residual": (LORA, {"init_lora_weights": "pissa_niter_4"}, "The final model of the run is converted"),
    "another kind": (("x.hada_w1_a",), {"peft_type": "LOHA"}, "this adapter has the type LOHA"),
    "another weight": ((*LORA, "norm.weight"), {}, "not LoRA matrices, such as base_model.model.norm.weight"),
    "head": (("lm_head.lora_A.weight", "lm_head.lora_B.weight"), {}, "embeddings or of the LM head"),
    "embeddings": (("embed_tokens.lora_embedding_A",), {}, "embeddings or of the LM head"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_as_a_file_of_its_own(plant, name):
    """It needs no merge. What llama.cpp cannot load is refused before the start."""
    run = plant(is_adapter=True)
    tensors, changes, named = ADAPTERS[name]
    (run.path / "model/adapter_config.json").write_text(json.dumps(BASE | changes))
    write_header(run.path / "model/adapter_model.safetensors", [f"base_model.model.{each}" for each in tensors])
    create_environment()
    if named:
        with pytest.raises(RunError, match=rf"{named}.*Merge the adapter, then export"):
            gguf.start(run, None, "lora-q8_0")
        return
    with pytest.raises(RunError, match=r"without llama.cpp's converter of LoRA adapters\. Run `footplate env create"):
        gguf.start(run, None, "lora-q8_0")
    script = environments.environment_folder("gguf") / environments.CONVERTER / environments.ADAPTER_SCRIPT
    script.parent.mkdir()
    script.touch()
    job = gguf.start(run, None, "lora-q8_0")
    assert json.loads((job.path / "gguf.json").read_text())["merge"] == ""
    finished(job, {"model": f"{FOLDER}/run-base-q8_0.gguf"})
    (job.path / FOLDER).mkdir()
    for file in ("run-base-q8_0.gguf", "run-adapter.gguf"):
        (job.path / FOLDER / file).touch()
    shown = gguf.as_json(job)["gguf"]
    assert shown["files"] == ["run-base-q8_0.gguf", "run-adapter.gguf"] and shown["adapter"].endswith(
        "run-adapter.gguf"
    )
    assert [found.id for found in gguf.exported(run)] == [job.id]
    (job.path / FOLDER / "run-adapter.gguf").unlink()
    assert gguf.as_json(job)["gguf"] is None and not gguf.exported(run), "the base model alone is not served as the run"
    with pytest.raises(RunError, match="has full weights and no adapter"):
        gguf.start(plant(), None, "lora-f16")


def write_header(path, names):
    """A safetensors file with a tensor of one byte for each name."""
    tensors = {name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
    header = json.dumps(tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(len(names)))


def finished(job, result, **state):
    (job.path / LOCK).touch()
    (job.path / RESULT).write_text(json.dumps(result))
    (job.path / "state.json").write_text(json.dumps({"end": "done", "exit_code": 0, **state}))


def test_exports_of_a_model(plant):
    run = plant()
    create_environment()
    model = trained.find(run)
    job = gguf.start(run, None, "f16")
    finished(job, {"model": f"{FOLDER}/a.gguf", "certificate": {"status": "verified"}})
    (job.path / FOLDER).mkdir()
    (job.path / FOLDER / "a.gguf").write_bytes(bytes(7))
    assert gguf.start(run, None, "f16").id == job.id and gguf.EXPORTS.find(run, model, "q8_0") is None
    shown = gguf.as_json(job)
    assert shown["gguf"] == {"file": str(job.path / FOLDER / "a.gguf"), "bytes": 7, "files": ["a.gguf"]}
    other = gguf.start(run, None, "q8_0")
    finished(other, {"model": "", "certificate": {"status": "differs"}}, end="failed", exit_code=1)
    assert [found.id for found in gguf.find_all(run, model)] == [other.id, job.id]
    assert gguf.as_json(other)["gguf"] is None
    assert gguf.start(run, None, "q8_0").id != other.id or not (other.path / RESULT).exists()
    (job.path / FOLDER / "a.gguf").unlink()
    assert gguf.EXPORTS.find(run, model, "f16") is None


@pytest.mark.parametrize(
    ("name", "stem"),
    [("Qwen3-0.6B LoRA, für Züge", "Qwen3-0.6B-LoRA-fur-Zuge"), ("../a/b.", "a-b"), ("列车", ""), ("x" * 99, "x" * 80)],
)
def test_files_have_the_name_of_the_run(tmp_path: Path, name: str, stem: str) -> None:
    """They are published, where an ID of this machine says nothing."""
    run = planted_run(tmp_path / "runs", RunSpec(), probe(Path.cwd()), name)
    assert gguf.file_stem(run) == (stem or run.id)
