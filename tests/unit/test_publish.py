"""What leaves the machine when a model is published: its files, the model card, and no path of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from published_run import CERTIFICATE, STATE, adapter_run, exported_job, merged_job, plant
from small import client

from backend.__main__ import main
from backend.publish import __main__ as process
from backend.publish import exports, folder, hub, publication
from backend.publish.contents import Request, contents
from backend.runs import LOCK, METRICS, MODEL, PROGRESS, RESULT, jobs
from backend.runs.folder import RunError

TO = {"repository": "ada/trains"}
NAMES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"]
BASE_ID = "org/base"


@pytest.fixture
def base(tmp_path):
    return tmp_path / "home/secret-base"


@pytest.fixture
def run(tmp_path, base):
    return adapter_run(tmp_path / "runs", base)


def text_of(found, name):
    file = next(file for file in found.files if file.name == name)
    return file.source.read_text() if file.text is None else file.text


def header(card):
    return yaml.safe_load(card.split("---")[1])


def test_an_adapter_with_the_id_of_its_base_model(run, base):
    found = contents(run, Request(**TO, base_model=BASE_ID, license="apache-2.0"))
    assert list(found.versions()) == NAMES and found.left_out == ()
    assert json.loads(text_of(found, "adapter_config.json"))["base_model_name_or_path"] == BASE_ID
    assert found.bytes == sum(len(text_of(found, name).encode()) for name in NAMES)
    for name in NAMES:
        assert str(run.path) not in text_of(found, name) and "secret" not in text_of(found, name), name
    assert header(found.card) == {
        "base_model": BASE_ID, "base_model_relation": "adapter", "library_name": "peft", "license": "apache-2.0",
        "pipeline_tag": "text-generation", "tags": ["sft", "lora", "footplate"],
    }  # fmt: skip
    for part in (
        'model_id = "ada/trains"', "`a.jsonl`", "1,400 training examples and 32 validation examples", "| Steps | 8 |",
        "| Tokens | 800 |", "| Training loss at the last logged step | 0.25 |", "| Validation loss | 0.375 |",
        "Score on 3 validation examples", "| Exact match | 0.0% | 75.0% |", "| peft | 0.21.2 |", "CPU, 2 processes",
    ):  # fmt: skip
        assert part in found.card, part
    assert "More Information" not in found.card and "None" not in found.card


def test_a_run_that_llamafactory_trained(tmp_path, base):
    """It saves the adapter of PiSSA as it is."""
    run = adapter_run(tmp_path / "others", base, **{"launch.trainer": "llamafactory"})
    found = contents(run, Request(**TO, base_model=BASE_ID))
    assert "Trained with LLaMA-Factory, started by Footplate." in found.card
    file = run.path / MODEL / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "init_lora_weights": "pissa"}))
    os.utime(run.path / MODEL, (10**9, 10**9))  # it is described again
    with pytest.raises(RunError, match="Merge it, and publish the merged model"):
        contents(run, Request(**TO, base_model=BASE_ID))


def test_an_adapter_without_the_id_of_its_base_model_is_refused(run):
    with pytest.raises(RunError, match=r"Enter the Hub ID of the base model \(--base-model\)"):
        contents(run, Request(**TO))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model.source": "hub", "model.hub_id": "org/hub-model", "model.path": ""}, "org/hub-model"),
        ({"model.source": "builtin", "model.path": ""}, "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ],
)
def test_base_models_that_the_run_knows(tmp_path, base, options, expected):
    found = contents(adapter_run(tmp_path / "runs", base, **options), Request(**TO))
    assert found.base_model == expected == header(found.card)["base_model"]
    assert json.loads(text_of(found, "adapter_config.json"))["base_model_name_or_path"] == expected
    assert "system prompt" not in found.card
    assert ("4-bit GGUF" in found.card) == (options["model.source"] == "builtin")


def test_the_revision_of_the_base_model_stays_with_its_repository(tmp_path, base):
    """peft loads the base model at this revision."""
    run = adapter_run(tmp_path / "runs", base, **{"model.source": "hub", "model.hub_id": "mirror/m", "model.path": ""})
    config = {"base_model_name_or_path": "mirror/m", "revision": "v2", "peft_version": "0.21.2"}
    plant(run.path / MODEL, {"adapter_config.json": config})
    for own, revision in (("", "v2"), ("mirror/m", "v2"), ("org/m", None)):
        published = contents(run, Request(**TO, base_model=own))
        assert json.loads(text_of(published, "adapter_config.json"))["revision"] == revision


def test_a_checkpoint_without_its_training_state_and_with_its_own_figures(run):
    found = contents(run, Request(**TO, step=4, base_model=BASE_ID))
    assert list(found.versions()) == NAMES
    assert set(found.left_out) == {*STATE, "complete"}
    for part in ("| Steps | 4 |", "| Tokens | 400 |", "logged step | 0.5 |", "| Validation loss | 0.625 |"):
        assert part in found.card, part
    assert "Exact match" not in found.card


def test_full_weights_of_another_stage(tmp_path, base):
    """The card has no options that this run did not use."""
    changes = {"train.stage": "pretraining", "method.kind": "full", "data.source": "hub", "data.hub_id": "org/texts"}
    run = adapter_run(tmp_path / "runs", base, **changes)
    model = run.path / MODEL
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (model / name).unlink()
    plant(
        model, {"config.json": {"_name_or_path": str(base), "transformers_version": "5.23.0"}, "model.safetensors": "y"}
    )
    found = contents(run, Request(**TO))
    assert "_name_or_path" not in json.loads(text_of(found, "config.json"))
    assert header(found.card)["datasets"] == ["org/texts"] and "base_model" not in header(found.card)
    assert "Full weights, fine-tuned from a base model without a Hub ID" in found.card
    for part in ("lora", "loss_on", "## Merge"):
        assert part not in found.card, part
    plant(run.path, {"spec.yaml": "save:\n  merge_adapter: true\n"})
    merged = contents(run, Request(**TO)).card
    assert "merged into [HuggingFaceTB" in merged and "was not compared with the base model" in merged


def test_a_system_prompt_is_not_published(tmp_path, base):
    run = adapter_run(tmp_path / "runs", base, **{"data.source": "builtin", "data.builtin": "trains"})
    card = contents(run, Request(**TO, base_model=BASE_ID)).card
    assert "Trains (demo)" in card and "have a system prompt, which is not published" in card
    assert "HH:MM" not in card


def test_a_system_prompt_with_line_separators_is_not_published(tmp_path, base):
    """Python's splitlines also splits at these characters, which JSON and the code have as they are."""
    prompt = "Be brief.\u2028a secret\x85another\x0bone\x1cmore\nlast"
    turns = [{"role": role, "content": text} for role, text in (("system", prompt), ("user", "q"), ("assistant", "a"))]
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"messages": turns}))
    run = adapter_run(tmp_path / "runs", base, **{"data.files": (str(data),)})
    (run.path / MODEL / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    os.utime(run.path / MODEL, (10**9, 10**9))  # it is described again
    card = contents(run, Request(**TO, base_model=BASE_ID)).card
    assert 'messages = [\n    {"role": "user"' in card and "have a system prompt, which is not published" in card
    assert not any(word in card for word in ("brief", "secret", "another", "one\x1c", "more", 'last"'))


def test_a_folder_with_a_name_that_is_not_ascii(tmp_path, base):
    card = contents(adapter_run(tmp_path / "läufe", base), Request(**TO, base_model=BASE_ID)).card
    assert 'model_id = "ada/trains"' in card and "läufe" not in card


def test_a_merged_model_needs_no_id_of_a_base_model(run, base):
    job = merged_job(run)
    plant(job.path / MODEL, {"certificate.json": {**CERTIFICATE, "base_model": str(base)}})
    found = contents(run, Request(**TO, merge=job.id))
    assert "base_model" not in header(found.card) and header(found.card)["library_name"] == "transformers"
    assert "base_model" not in json.loads(text_of(found, "certificate.json"))
    assert "Verified: the merged model was loaded from its files (bf16)" in found.card and "1e-05 nats" in found.card


def test_a_repository_whose_other_weights_would_be_loaded(run):
    """transformers loads an adapter and its base model before full weights, and one file before shards."""
    merged = contents(run, Request(**TO, merge=merged_job(run).id))
    adapter = contents(run, Request(**TO, base_model=BASE_ID))
    adapter.check_repository("ada/trains", [*adapter.versions(), *merged.versions()])
    merged.check_repository("ada/trains", [*merged.versions(), "model-00001-of-00002.safetensors", "x.gguf"])
    with pytest.raises(RunError, match=r"ada/trains has adapter_config\.json, which would stay there and be loaded"):
        merged.check_repository("ada/trains", adapter.versions())
    (run.path / MODEL / "adapter_model.safetensors").rename(run.path / MODEL / "adapter_model.bin")
    with pytest.raises(RunError, match=r"has adapter_model\.safetensors, which would stay"):
        contents(run, Request(**TO, base_model=BASE_ID)).check_repository("ada/trains", adapter.versions())
    job = merged_job(run)
    (job.path / MODEL / "model.safetensors").rename(job.path / MODEL / "model-00001-of-00001.safetensors")
    plant(job.path / MODEL, {"model.safetensors.index.json": {}})
    with pytest.raises(RunError, match=r"has adapter_config\.json and model\.safetensors, which"):
        found = contents(run, Request(**TO, merge=job.id))
        found.check_repository("ada/trains", ["model.safetensors", *adapter.versions()])


def published_to(run, repository, **request):
    """The job of a publication that has ended."""
    job = jobs.create(run, jobs.PUBLISH, {"request": {"step": None, "repository": repository, **request}}, {}, {})
    (job.path / LOCK).touch()
    plant(job.path, {RESULT: {"repository": repository}, "state.json": {"end": "done", "exit_code": 0}})


def test_gguf_files_in_one_repository(run):
    """The card also describes a format that is there already. Texts of the run stay here."""
    ids = {format: exported_job(run, jobs.GGUF, format).id for format in ("q8_0", "q4_k_m", "f16")}
    published_to(run, TO["repository"], exports=[ids["f16"]])
    found = contents(run, Request(**TO, exports=(ids["q8_0"], ids["q4_k_m"]), base_model=BASE_ID))
    others = [name.format(f) for f in ("q8_0", "q4_k_m") for name in ("Modelfile-{}", "certificate-{}.json")]
    assert set(found.versions()) == {"README.md", *others, *(f"{run.id}-{f}.gguf" for f in ("q8_0", "q4_k_m"))}
    certificate = json.loads(text_of(found, "certificate-q8_0.json"))
    assert certificate["status"] == "verified" and not {"outputs", "run", "merge"} & set(certificate)
    assert header(found.card) == {
        "base_model": BASE_ID, "base_model_relation": "finetune", "pipeline_tag": "text-generation",
        "tags": ["sft", "lora", "gguf", "footplate"],
    }  # fmt: skip
    for part in (
        "GGUF files (q8_0, q4_k_m, f16) of a model fine-tuned from [org/base]", "| torch (export) | 2.13.0 |",
        f"llama-server -m trains/{run.id}-q8_0.gguf\n", "hf download ada/trains --local-dir trains\n",
        "| q8_0 | 400 bytes | 0.007 (limit 0.03) | 93.8% of 512 positions | verified |",
        "Limitation (q4_k_m): Rare.", "Each file was loaded in llama.cpp",
    ):  # fmt: skip
        assert part in found.card, part
    assert "secret" not in found.card and "## Merge" not in found.card
    for name in (f"{run.id}-q8_0.gguf", "Modelfile"):
        (file := run.path / "jobs" / ids["q8_0"] / "gguf" / name).write_text(f"GGUF {run.path}/x")
        with pytest.raises(RunError, match="contains a path of this machine"):
            contents(run, Request(**TO, exports=(ids["q8_0"],)))
        file.write_text("GGUF")


def test_a_gguf_lora_adapter_and_a_system_prompt(run):
    """Modelfile and preset have the system prompt of training, also if the training data is gone."""
    job = exported_job(run, jobs.GGUF, "lora-q8_0", has_prompt=True)
    found = contents(run, Request(folder="/x", exports=(job.id,), base_model=BASE_ID))
    assert found.left_out == ("Modelfile-lora-q8_0",) and header(found.card)["base_model_relation"] == "adapter"
    assert f"llama-server -m {run.id}-base-q8_0.gguf --lora {run.id}-adapter.gguf\n" in found.card
    assert "A LoRA adapter in GGUF, with its base model (lora-q8_0), for [org/base]" in found.card


def test_a_quantized_checkpoint_names_the_weights_that_were_quantized(run):
    job, merged = exported_job(run, jobs.QUANTIZE, "torchao-int8"), merged_job(run)
    found = contents(run, Request(**TO, exports=(job.id,), base_model=BASE_ID))
    assert {"config.json", "model.safetensors", "certificate.json", "README.md"} < set(found.versions())
    assert header(found.card)["base_model_relation"] == "finetune" and header(found.card)["base_model"] == BASE_ID
    for part in (
        "A quantized checkpoint (torchao int8: 8 bits", "Loading it needs torchao 0.15.0 or later.",
        'model_id = "ada/trains"', "The checkpoint was loaded by transformers in a new process",
    ):  # fmt: skip
        assert part in found.card, part
    published_to(run, "ada/merged", merge=merged.id)
    private, public = (contents(run, Request(**TO, exports=(job.id,), public=is_public)) for is_public in (False, True))
    assert header(private.card)["base_model"] == "ada/merged" and "of [ada/merged](" in private.card
    assert header(private.card)["base_model_relation"] == "quantized"
    assert "base_model" not in header(public.card)  # which does not name a private repository


def test_exports_that_are_not_published_are_named(run):
    exported = {f: exported_job(run, jobs.GGUF, f) for f in ("q8_0", "lora-q8_0", "f16", "bf16", "q6_k")}
    plant(exported["f16"].path, {"state.json": {"end": "failed", "exit_code": 1}})
    plant(exported["bf16"].path, {RESULT: {"model": f"gguf/{run.id}-bf16.gguf", "certificate": {"status": "differs"}}})
    (exported["q6_k"].path / f"gguf/{run.id}-q6_k.gguf").unlink()
    checkpoints = [exported_job(run, jobs.QUANTIZE, format).id for format in ("torchao-int8", "bnb-int8")]
    ids = {format: job.id for format, job in exported.items()}
    for chosen, message in (
        ([ids["f16"]], r"The GGUF file f16 \(.*\) is not published: Failed\."),
        ([ids["bf16"]], "The GGUF file bf16 .* was not verified"),
        ([ids["q6_k"]], "The GGUF file q6_k .* was deleted"),
        ([merged_job(run).id], "is not an export of a model"),
        (["gone"], "no longer exists"),
        (checkpoints, "needs a repository of its own"),
        ([ids["q8_0"], checkpoints[0]], "needs a repository of its own"),
        ([ids["q8_0"], ids["lora-q8_0"]], "need different repositories"),
    ):
        with pytest.raises(RunError, match=message):
            contents(run, Request(**TO, exports=chosen))
    with pytest.raises(RunError, match="is of another checkpoint"):
        contents(run, Request(**TO, step=4, exports=[ids["q8_0"]]))
    with pytest.raises(RunError, match=r"has no export in the format q5_k_m\. Export it first: footplate export-model"):
        exports.find_named(run, None, ["q8_0", "q5_k_m"])
    assert exports.find_named(run, None, ["q8_0", "torchao-int8"]) == (ids["q8_0"], checkpoints[0])


@pytest.mark.parametrize(
    ("file", "place"),
    [("chat_template.jinja", "home"), ("generation_config.json", "run"), ("tokenizer.json", "home"), ("a.txt", "base")],
)
def test_a_path_of_this_machine_is_refused(run, base, tmp_path, monkeypatch, file, place):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = {"home": tmp_path / "home/data.jsonl", "run": run.path / "x", "base": base}[place]
    text = f"see {path} for more"
    plant(run.path / MODEL, {file: json.dumps({"a": [text]}).replace("/", "\\/") if "json" in file else text})
    with pytest.raises(RunError, match="contains a path of this machine") as error:
        contents(run, Request(**TO, base_model=BASE_ID))
    assert file in str(error.value) and str(path) in str(error.value)


def test_a_link_is_refused(run, tmp_path):
    (run.path / MODEL / "extra.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is a symbolic link"):
        contents(run, Request(**TO, base_model=BASE_ID))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "Choose one destination"),
        ({**TO, "folder": "/x"}, "Choose one destination"),
        ({"repository": "a/b/c"}, "'a/b/c' must be named account/name"),
        ({"folder": "x"}, "'x' must be an absolute path"),
        ({"folder": "/x", "public": True}, "Leave the visibility out"),
        ({**TO, "license": "My License"}, "'My License' must be an identifier"),
        ({**TO, "base_model": "/models/x"}, "'/models/x' must be the ID of a model"),
        ({**TO, "step": 7, "base_model": BASE_ID}, "no checkpoint of step 7 .* Choose a checkpoint of step 4"),
        ({**TO, "merge": "gone"}, "no longer exists"),
    ],
)
def test_requests_that_cannot_be_published(run, values, message):
    with pytest.raises(RunError, match=message):
        contents(run, Request(**values))


def test_the_file_of_a_sentencepiece_tokenizer_is_published(run):
    (run.path / MODEL / "tokenizer.model").write_bytes(b"sentencepiece")
    assert "tokenizer.model" in contents(run, Request(**TO, base_model=BASE_ID)).versions()


def test_a_checkpoint_for_changed_base_weights_is_refused(run):
    path = run.path / "checkpoints/checkpoint-4/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "init_lora_weights": "pissa"}))
    with pytest.raises(RunError, match="base weights as the initialization has changed them"):
        contents(run, Request(**TO, step=4, base_model=BASE_ID))


@pytest.mark.parametrize("token", ["hf_abc\x1bdef", "hf_abc def", "hf_abcé"])
def test_a_token_that_cannot_be_sent_is_not_repeated(monkeypatch, token):
    monkeypatch.setattr(hub, "get_token", lambda: token)
    with pytest.raises(hub.PublishError, match="contains a space, a control character") as error:
        hub.state("ada/trains", public=False)
    assert "hf_abc" not in str(error.value)


def test_a_folder_appears_complete(run, tmp_path, monkeypatch):
    target = tmp_path / "out"
    summary = publication.summary(run, Request(folder=str(target), base_model=BASE_ID))
    assert summary.effect == f"Copies the files to the folder {target}."
    shown = []
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_blocks", lambda source, text: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            folder.publish(summary.contents, target, lambda *_: None)
    assert not list(tmp_path.glob("*out*"))
    target.mkdir()
    assert folder.publish(summary.contents, target, lambda *given: shown.append(given)) == {"folder": str(target)}
    assert {path.name: path.stat().st_size for path in target.iterdir()} == {
        file.name: file.bytes for file in summary.contents.files
    }
    assert shown[-1][1] == 1.0
    for place, message in ((target, "is not an empty folder"), (tmp_path / "no/out", "does not exist")):
        with pytest.raises(RunError, match=message):
            folder.check(place)


def test_files_that_changed_since_they_were_shown_are_not_published(run, tmp_path, monkeypatch):
    monkeypatch.setattr("backend.runs.folder.Run.start", lambda self, timeouts: (self.path / LOCK).touch())
    request = Request(folder=str(tmp_path / "out"), base_model=BASE_ID)
    job = publication.start(run, request, contents(run, request).versions())
    weights, metrics = run.path / MODEL / "adapter_model.safetensors", run.path / METRICS
    before, written = metrics.read_text(), weights.stat().st_mtime_ns
    for change, undo in (
        (lambda: plant(run.path / MODEL, {"notes.txt": "new"}), lambda: (run.path / MODEL / "notes.txt").unlink()),
        (lambda: os.utime(weights, ns=(1, 1)), lambda: os.utime(weights, ns=(written, written))),  # the same size
        (lambda: metrics.write_text(before.replace("0.25", "0.75")), lambda: metrics.write_text(before)),
    ):
        change()
        with pytest.raises(RunError, match="have changed since they were listed"):
            process.run_job(job.path)
        undo()
    process.run_job(job.path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES
    assert json.loads((job.path / RESULT).read_text())["folder"] == str(tmp_path / "out")
    assert json.loads((job.path / PROGRESS).read_text())["phase"] == "done"


@pytest.mark.parametrize("cause", ["[Errno -2] Name or service not known", "[Errno 28] No space left on device"])
def test_the_failure_of_a_job_is_its_own_sentence(run, cause):
    """Not one of the known failures of a training, whose fixes do not help here."""
    job = jobs.create(run, jobs.PUBLISH, {}, {}, {})
    (job.path / LOCK).touch()
    sentence = f"The connection to the Hub failed ({cause}). Publish again later."
    log = f"---- started now ----\n{cause}\nRetrying in 1s\nbackend.publish.PublishError: {sentence}\n"
    plant(job.path, {"log.txt": log, "state.json": {"end": "failed", "exit_code": 1}})
    assert (
        publication.as_json(job)["failure"]["sentence"] == sentence and not publication.as_json(job)["failure"]["help"]
    )


def test_the_command_shows_and_asks(run, tmp_path, capsys, monkeypatch):
    command = ["publish", str(run.path), "--folder", str(tmp_path / "out"), "--base-model", BASE_ID]
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "Copies the files to the folder" in printed and "  adapter_model.safetensors  1,000 bytes\n" in printed
    assert "5 files, " in printed and "# out\n" in printed
    assert main([*command, "--dry-run", "--json"]) == 0
    assert [file["name"] for file in json.loads(capsys.readouterr().out)["files"]] == NAMES
    assert main(command) == 2 and "confirm with --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda: "n")
    assert main(command) == 1 and "Nothing was published." in capsys.readouterr().err
    assert not Path(tmp_path / "out").exists()


def test_the_command_says_how_to_fix_a_failure(run, tmp_path, capsys, monkeypatch):
    def fail(job, timeouts):
        (job.path / LOCK).touch()
        plant(job.path, {"state.json": {"end": "failed", "exit_code": 1}})

    monkeypatch.setattr("backend.runs.folder.Run.start", fail)
    monkeypatch.setattr("backend.runs.folder.Run.failure", lambda job: {"sentence": "It failed.", "help": "Fix it."})
    assert main(["publish", str(run.path), "--folder", str(tmp_path / "out"), "--base-model", BASE_ID, "--yes"]) == 1
    assert capsys.readouterr().err.endswith("It failed. Fix it.\n")


def test_the_page_publishes_what_it_has_shown(run, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("backend.runs.folder.Run.start", lambda self, timeouts: started.append(self))
    body = {"folder": f" {tmp_path / 'out'}", "base_model": BASE_ID}
    with client(run.path.parent) as web:
        place = f"/api/runs/{run.id}/publications"
        summary = web.post(f"{place}/summary", json=body).json()
        shown = {file["name"]: file["version"] for file in summary["files"]}
        assert list(shown) == NAMES and summary["card"].startswith("---\n")
        assert web.post(place, json={"shown": shown}).status_code == 409 and not started
        assert web.post(place, json={**body, "shown": shown}).status_code == 201
        planned = json.loads((started[0].path / "publish.json").read_text())
        assert planned["files"] == shown and planned["request"]["folder"] == str(tmp_path / "out")
        assert [job["id"] for job in web.get(f"/api/runs/{run.id}").json()["publications"]] == [started[0].id]
        assert web.post(f"/api/runs/{run.id}/jobs/nothing/stop", json={}).status_code == 404
        assert web.delete(f"/api/runs/{run.id}/jobs/{started[0].id}").status_code == 200
        assert not web.get(f"/api/runs/{run.id}").json()["publications"]
