"""What the page says about the model that a run has trained, and the zip file of it."""

import io
import json
import os
import zipfile
from datetime import datetime
from urllib.parse import unquote

import pytest
import yaml
from small import client

from backend.__main__ import main
from backend.models import trained
from backend.runs import Plan
from backend.runs.folder import Run, RunError
from webui.api.model_zip import zipped

ADAPTER = {"adapter_config.json": {"base_model_name_or_path": "Qwen/Qwen3-8B", "task_type": "CAUSAL_LM"}}
FULL = {"config.json": {"architectures": ["Qwen3ForCausalLM"]}}
TEMPLATE = {"tokenizer_config.json": {"chat_template": "{{ messages }}"}}
PLAIN = {"tokenizer_config.json": {}}
STATE = (
    "complete", "optimizer.pt", "rng_state_0.pth", "trainer_state.json", "scheduler.pt", "latest", "zero_to_fp32.py",
    "global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "ref/adapter_model.safetensors",
    "pytorch_model_fsdp_0/__0_0.distcp",
)  # fmt: skip


def plant(folder, files, weights="model.safetensors"):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / weights).write_bytes(b"x" * 3_000_000)


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = Run.create(tmp_path, "r", Plan(("true",)), datetime.now())
    monkeypatch.setattr(Run, "result", lambda self: json.loads(self._text("result.json") or "{}"))
    return made


def finish(run):
    (run.path / "result.json").write_text('{"model": "model"}')


def checkpoint(run, step, files, weights="model.safetensors"):
    folder = run.path / f"checkpoints/checkpoint-{step}"
    plant(folder, files, weights)
    for name in STATE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"state")


def test_nothing_before_the_first_checkpoint(run):
    assert trained.find(run) is None


def test_an_adapter(run):
    plant(run.path / "model", {**ADAPTER, **TEMPLATE}, "adapter_model.safetensors")
    finish(run)
    found = trained.find(run)
    assert (found.step, found.base) == (None, "Qwen/Qwen3-8B") and found.bytes > 3_000_000
    assert "AutoPeftModelForCausalLM" in found.code and "apply_chat_template" in found.code
    assert json.dumps(str(run.path / "model")) in found.code


@pytest.mark.parametrize("trusts", [True, False])
def test_a_model_with_code_of_its_own(run, trusts):
    """Its tokenizer may have code, too; the options of a merge are those of its run."""
    model = {"source": "path", "path": "/models/own", "trust_remote_code": trusts}
    (run.path / "spec.yaml").write_text(yaml.safe_dump({"model": model}))
    plant(run.path / "model", {**ADAPTER, **TEMPLATE}, "adapter_model.safetensors")
    plant(run.path / "jobs/merge/model", {**FULL, **TEMPLATE})
    for found in (trained.find(run), trained.find(Run(run.path / "jobs/merge"))):
        loads = [line for line in found.code.splitlines() if "from_pretrained(folder" in line]
        assert ["trust_remote_code=True)" in line for line in loads] == [trusts, trusts]


def test_the_newest_checkpoint_until_the_end(run, monkeypatch, capsys):
    steps = []

    def start(run, step):
        steps.append(step)
        raise RunError("It is enough.")

    monkeypatch.setattr("backend.models.merge.start", start)
    checkpoint(run, 2, {**FULL, **PLAIN})
    checkpoint(run, 10, {**FULL, **PLAIN})
    found = trained.find(run)
    assert found.step == 10 and found.base == "" and "Once upon a time" in found.code
    assert [file.name for file in found.files()] == ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert main(["merge", str(run.path)]) == 2 and steps == [10]
    assert "has no final model. Using its newest checkpoint, of step 10" in capsys.readouterr().err
    plant(run.path / "model", {**FULL, **TEMPLATE})
    finish(run)
    assert trained.find(run).step is None
    main(["merge", str(run.path)])
    main(["merge", str(run.path), "--step", "2"])
    assert steps == [10, None, 2] and "newest" not in capsys.readouterr().err


def test_the_model_of_an_earlier_start_is_not_that_of_the_run(run):
    """After a restart from scratch that is stopped before its first checkpoint."""
    plant(run.path / "model", {**FULL, **TEMPLATE})
    assert trained.find(run), "saved, but the run failed before it wrote its result"
    (run.path / "lock").touch()
    assert trained.find(run) is None


ADDS_EOS = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]}
ADDS_BOS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}


@pytest.mark.parametrize(
    ("processor", "adds_eos"),
    [
        (ADDS_EOS, True),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, ADDS_EOS]}, True),
        ({"type": "ByteLevel"}, False),
        (ADDS_BOS, False),
        (None, False),
    ],
)
def test_a_text_is_continued(run, processor, adds_eos):
    """transformers 5 ignores add_eos_token if there is a tokenizer.json (test_chat_process.py)."""
    tokenizer = {"tokenizer_config.json": {"add_eos_token": not adds_eos, "eos_token": {"content": "</s>"}}}
    plant(run.path / "model", {**FULL, **tokenizer, "tokenizer.json": {"post_processor": processor}})
    finish(run)
    code = trained.find(run).code
    assert "Once upon a time" in code and ("without the EOS token" in code) == adds_eos


TEXTS = {"data": {"source": "files", "files": ["/data/texts.jsonl"], "format": "text"}}


@pytest.mark.parametrize("changes", [{"train": {"stage": "pretraining"}}, TEXTS, {}])
def test_a_model_that_was_trained_on_texts_continues_one(run, changes):
    """Also if its tokenizer has the chat template of the base model."""
    (run.path / "spec.yaml").write_text(yaml.safe_dump(changes))
    plant(run.path / "model", {**FULL, **TEMPLATE})
    finish(run)
    assert ("apply_chat_template" in trained.find(run).code) == (not changes)


def test_a_reward_model_scores(run):
    plant(run.path / "model", {"config.json": {"architectures": ["LlamaForSequenceClassification"]}, **TEMPLATE})
    finish(run)
    code = trained.find(run).code
    assert "AutoModelForSequenceClassification" in code and "num_labels=1" in code and "generate" not in code
    assert '"role": "assistant"' in code and "add_generation_prompt" not in code, "it scores completions, not prompts"
    assert trained.find(run).is_reward_model


@pytest.mark.parametrize("broken", ["shards", "no tokenizer", "damaged", "list"])
def test_what_cannot_be_loaded_is_not_offered(run, broken):
    checkpoint(run, 4, {**FULL, **PLAIN}, "pytorch_model_fsdp.bin" if broken == "shards" else "model.safetensors")
    folder = run.path / "checkpoints/checkpoint-4"
    if broken == "no tokenizer":
        (folder / "tokenizer_config.json").unlink()
    elif broken == "damaged":
        (folder / "config.json").write_text("{")
    elif broken == "list":
        (folder / "config.json").write_text("[1]")
    assert trained.find(run) is None


def test_the_zip_file_has_the_model_without_the_state_of_the_training(run):
    checkpoint(run, 4, {**FULL, **PLAIN})
    (run.path / "checkpoints/checkpoint-4/below").mkdir()
    (run.path / "checkpoints/checkpoint-4/below/more.txt").write_text("more")
    found = trained.find(run)
    blocks = list(zipped(found.folder, found.files(), "name"))
    assert max(map(len, blocks)) < 2_000_000, "never the whole file in memory"
    with zipfile.ZipFile(io.BytesIO(b"".join(blocks))) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names == [f"name/{file.relative_to(found.folder)}" for file in found.files()]
        assert archive.read("name/model.safetensors") == b"x" * 3_000_000
        assert not {f"name/{name}" for name in STATE} & {*names}
    assert found.bytes == sum(file.stat().st_size for file in found.files()) < 3_001_000


def test_the_zip_file_of_a_copied_model(run):
    """Some programs set the time of a copy to 1970, which zip files cannot express."""
    plant(run.path / "model", {**FULL, **PLAIN})
    os.utime(run.path / "model/config.json", (0, 0))
    blocks = zipped(run.path / "model", trained.files_in(run.path / "model"), "name")
    with zipfile.ZipFile(io.BytesIO(b"".join(blocks))) as archive:
        assert archive.testzip() is None and len(archive.namelist()) == 3


@pytest.mark.parametrize("name", ["run-two", "run-\u6a21\u578b"])
def test_the_zip_file_of_a_run_whose_folder_was_renamed(run, name):
    """Headers are Latin-1."""
    renamed = Run(run.path.rename(run.path.with_name(name)))
    plant(renamed.path / "model", {**FULL, **PLAIN})
    finish(renamed)
    response = client(renamed.path.parent).get(f"/api/runs/{name}/model.zip")
    assert response.status_code == 200
    assert unquote(response.headers["content-disposition"].partition("=")[2]).strip('"').endswith(f"{name}-model.zip")


def test_the_zip_file_follows_no_links(run, tmp_path):
    (tmp_path / "secret").write_text("secret")
    plant(run.path / "model", {**FULL, **PLAIN})
    finish(run)
    model = run.path / "model"
    (model / "vocab.json").symlink_to(tmp_path / "secret")
    response = client(run.path.parent).get(f"/api/runs/{run.id}/model.zip")
    assert response.status_code == 409 and "vocab.json is a symbolic link" in response.json()["error"]
    with pytest.raises(OSError, match=r"vocab\.json"):
        list(zipped(model, [model / "vocab.json"], "name"))
