"""The chat with a run's models, without its process: the files, what is offered, the endpoints and the command."""

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from failed_runs import ended, planted_run
from small import client
from waiting import wait_for

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import Machine
from backend.memory import inference
from backend.models import chat, chat_files, evaluation, system_prompt, trained
from backend.models.chat_files import BASE, CLEAR, OUTPUTS, REQUESTS, STOP, TUNED, Lines, Request
from backend.runs import RESULT, STATE, jobs, processes
from backend.runs.folder import ALIVE, RunError

LORA = {"model.builtin": "tiny-llama", "logging.run_name": "chatty"}
# In place of Python: the process of the chat only waits for the stop, everything else is Python.
WAITER = f"""#!/bin/sh
case "$*" in
    "-m backend.inference ."*) touch running; while [ ! -e stop ]; do sleep 0.05; done; exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
PROMPT = {"prompt": "Hello"}


def make_run(root, changes=LORA, files=("tokenizer_config.json", "adapter_config.json"), template="x"):
    """A run that has finished, with a model and the checkpoint of step 2."""
    run = planted_run(root, edit(RunSpec(), changes), Machine(), "chatty")
    for folder in (run.path / "model", run.path / "checkpoints/checkpoint-2"):
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_text(json.dumps({"chat_template": template, "base_model_name_or_path": "b"}))
        (folder / "adapter_model.safetensors").write_bytes(b"x")
        (folder / "complete").write_text("")
    ended(run, end="done", exit_code=0)
    (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
    return run


def send(folder, **values):
    return chat_files.send(folder, Request(**{**PROMPT, **values}))


def use_waiter(folder, monkeypatch):
    """From now on, processes of chats and evaluations are WAITER."""
    program = folder / "python"
    program.write_text(WAITER)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


# -- the files -----------------------------------------------------------------------------------------------------


def test_turns_of_a_conversation(tmp_path):
    first, second = send(tmp_path), send(tmp_path, prompt="More", sides=(TUNED, BASE))
    other = send(tmp_path, conversation="other")
    chat_files.append(tmp_path / OUTPUTS, {"id": first, "side": TUNED, "text": "left by a process that was killed"})
    for part in ({"begin": 1.0}, {"text": "Hel"}, {"text": "lo"}):
        chat_files.append(tmp_path / OUTPUTS, {"id": first, "side": TUNED, **part})
    one, two = chat_files.read_turns(tmp_path, "page")
    assert one.outputs == {TUNED: {"text": "Hello"}} and not one.is_done and not two.outputs
    chat_files.append(tmp_path / OUTPUTS, {"id": first, "side": TUNED, "end": "limit", "text": "Hello!"})
    chat_files.append(tmp_path / OUTPUTS, {"id": second, "side": TUNED, "end": "stopped", "text": ""})
    one, two = chat_files.read_turns(tmp_path, "page")
    assert one.is_done and one.outputs[TUNED]["text"] == "Hello!" and not two.is_done
    assert [turn.request.id for turn in chat_files.read_turns(tmp_path, "other")] == [other]

    again = send(tmp_path, replaces=first)
    assert [turn.request.id for turn in chat_files.read_turns(tmp_path, "page")] == [again]
    chat_files.send(tmp_path, Request(kind=CLEAR))
    last = send(tmp_path, prompt="New")
    assert [turn.request.id for turn in chat_files.read_turns(tmp_path, "page")] == [last]


def test_lines_of_many_clients_do_not_mix(tmp_path):
    def send_many(number):
        for _ in range(50):
            send(tmp_path, prompt=f"{number} " * 2000)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(send_many, range(8)))
    found = [chat_files.parse(value) for value in Lines(tmp_path / REQUESTS).read()]
    assert len(found) == 400 and all(found) and len({request.id for request in found}) == 400
    assert all(len(set(request.prompt.split())) == 1 for request in found)


def test_lines_are_read_once_and_only_when_they_are_complete(tmp_path):
    lines = Lines(tmp_path / OUTPUTS, chat_files.DETAILS)
    assert lines.read() == []
    (tmp_path / OUTPUTS).write_bytes(b'{"a": 1}\nbroken\n[1]\n{"details": ["x", "trained"]}\n{"b": "\\ud800"')
    assert lines.read() == [{"a": 1}]
    with (tmp_path / OUTPUTS).open("ab") as file:
        file.write(b"}\n")
    assert lines.read() == [{"b": "\ufffd"}] and lines.read() == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": " \n"}, "empty"),
        ({"prompt": "x" * 70_000}, "at most 64 KiB"),
        ({"system": "x" * 70_000}, "at most 64 KiB"),
        ({"answers": ("one",)}, "two completions"),
        ({"sides": ("other",)}, "trained and base"),
        ({"sides": ()}, "trained and base"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "new tokens"),
        ({"seed": -1}, "seed"),
        ({"role": "system"}, "role"),
        ({"role": "tool", "history": False}, "Include earlier turns"),
        ({"tools": "[{]"}, "Tools: this is not valid JSON"),
        ({"tools": "{}"}, "Tools: expected a list of tool definitions, got an object"),
        ({"tools": '[{"type": "function", "function": {}}]'}, "Tools: definition 1 has no function with a name"),
        ({"tools": "[" * 100_00}, "Tools"),
        ({"template_kwargs": {"tools": []}}, "remove tools, which the chat sets itself"),
    ],
    ids=str,
)
def test_invalid_requests(tmp_path, values, words):
    with pytest.raises(RunError, match=words):
        send(tmp_path, **values)
    assert not (tmp_path / REQUESTS).exists()


def test_a_request_of_another_program_is_ignored():
    assert chat_files.parse({"id": "a", "prompt": 1}) is None
    assert chat_files.parse({"id": "a", "prompt": "x", "temperature": "hot"}) is None
    assert chat_files.parse({"prompt": "without an id"}) is None
    assert chat_files.parse({"id": "a", "prompt": "x", "unknown": 1}).prompt == "x"


def test_clients(tmp_path):
    assert chat_files.last_sign(tmp_path) == 0
    chat_files.touch_client(tmp_path, "page")
    chat_files.touch_client(tmp_path, "shell-1")
    assert time.time() - chat_files.last_sign(tmp_path) < 5
    assert chat_files.other_clients(tmp_path, "shell-1")
    os.utime(tmp_path / "clients/page", (1, 1))
    assert not chat_files.other_clients(tmp_path, "shell-1")
    chat_files.remove_client(tmp_path, "shell-1")
    assert chat_files.last_sign(tmp_path) == 1


# -- what is offered -----------------------------------------------------------------------------------------------


def test_offers(tmp_path):
    found = chat.offer(make_run(tmp_path))
    assert (found.mode, found.steps, found.without_base) == ("chat", (None, 2), "")
    assert found.system == "As JSON: train, from, to, time (HH:MM), platform."
    plain = chat.offer(make_run(tmp_path, template=""))
    assert (plain.mode, plain.system) == ("text", "")
    assert chat.offer(make_run(tmp_path, {**LORA, "train.stage": "pretraining"})).mode == "text"
    reward = chat.offer(make_run(tmp_path, {**LORA, "train.stage": "reward", "data.builtin": "train-pairs"}))
    assert reward.mode == "score" and "no base model" in reward.without_base


def test_a_run_without_a_model_is_refused(tmp_path):
    run = make_run(tmp_path, files=())
    with pytest.raises(RunError, match="has no model to load"):
        chat.offer(run)
    with pytest.raises(RunError, match="no model"):
        chat.start(run)


@pytest.mark.parametrize("init", [True, False, "gaussian", None])
def test_usual_adapters_are_on_the_base_weights(init):
    assert not trained.is_residual({"init_lora_weights": init})


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "lora_ga"])
def test_adapters_that_were_taken_out_of_the_base_weights(init):
    assert trained.is_residual({"init_lora_weights": init})


def test_the_system_prompt_of_training(tmp_path):
    def of(*systems, bad="", **changes):
        turns = [[{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}] for _ in systems]
        whole = [[*([{"role": "system", "content": s}] if s else []), *t] for s, t in zip(systems, turns, strict=True)]
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in whole) + bad)
        return system_prompt.of_training(
            edit(RunSpec(), {"data.source": "files", "data.files": [str(path)], **changes})
        )

    assert of("S", "S") == "S"
    for bad in ('{"messages": []}', "{no JSON", '{"other": 1}'):  # examples that the run has skipped
        assert of("S", "S", bad=bad) == "S"
    assert of("S", "T") == "" and of("S", "") == ""
    assert of("", "", **{"data.system_prompt": "D"}) == "D"
    assert of("S", "T", **{"data.system_prompt": "D"}) == "D"
    gone = {"data.source": "files", "data.files": [str(tmp_path / "gone.jsonl")], "data.system_prompt": "D"}
    assert system_prompt.of_training(edit(RunSpec(), gone)) == "D"


def test_the_devices_of_a_chat(tmp_path):
    run = make_run(tmp_path)
    env, devices = jobs.place(run, is_light=True)
    assert devices == {} and env["OMP_NUM_THREADS"] == "1" and env["CUDA_VISIBLE_DEVICES"] == ""
    env, devices = jobs.place(run, is_light=False)
    assert env["OMP_NUM_THREADS"] == run.plan().env["OMP_NUM_THREADS"] and devices == dict(run.plan().devices)
    resolved = json.loads((run.path / "resolved.json").read_text())
    (run.path / "resolved.json").write_text(json.dumps({**resolved, "device": "cuda", "device_ids": [3, 4]}))
    plan = json.loads((run.path / "plan.json").read_text())
    plan["devices"] = {"GPU-a": "GPU 3", "GPU-b": "GPU 4"}
    (run.path / "plan.json").write_text(json.dumps(plan))
    env, devices = jobs.place(run, is_light=True)
    assert devices == {"GPU-a": "GPU 3"} and env["CUDA_VISIBLE_DEVICES"] == "3"
    plan["env"] |= {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "HIP_VISIBLE_DEVICES": "3,4"}
    (run.path / "plan.json").write_text(json.dumps(plan))
    env, _ = jobs.place(run, is_light=True)
    assert (env["CUDA_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"]) == ("GPU-a", "3")


# -- endpoints and command -----------------------------------------------------------------------------------------


@pytest.fixture
def waiter(tmp_path, monkeypatch):
    """The process of a chat is a program that waits for the stop."""
    use_waiter(tmp_path, monkeypatch)


@pytest.fixture
def api(tmp_path, waiter):
    with client(tmp_path / "runs", detect_machine=lambda _: Machine()) as found:
        yield found
    for run in (tmp_path / "runs").glob("2*"):
        for job in (run / "jobs").glob("2*"):
            assert not (job / "running").exists() or (job / "stop").exists()


def test_a_waiting_chat_names_the_run_that_it_waits_for(tmp_path, api):
    run = make_run(tmp_path / "runs")
    job = jobs.create(run, jobs.CHAT, {}, {}, {})
    lock = processes.acquire_lock(job.path)
    try:
        (job.path / STATE).write_text(json.dumps({"queued": 1.0, "waiting": f"{run.id} uses the CPU."}))
        shown = api.get(f"/api/runs/{run.id}/chat").json()["job"]
        assert shown["sentence"] == f"Waiting in the queue. {run.name} uses the CPU."
    finally:
        processes.release(lock)


def test_the_endpoints(tmp_path, api):
    run = make_run(tmp_path / "runs")
    path = f"/api/runs/{run.id}/chat"
    shown = api.get(path).json()
    assert shown["job"] is None and shown["turns"] == [] and not shown["alive"]
    assert shown["offer"]["steps"] == [None, 2]
    assert not shown["offer"]["history"], "the examples of its dataset have one turn"
    assert api.post(f"{path}/end", json={}).status_code == 409
    assert api.post(path, json={}).status_code == 201
    assert api.post(path, json={}).status_code == 201, "it is alive already"
    job = chat.current(run)
    assert job.state in ALIVE

    id = api.post(f"{path}/requests", json={**PROMPT, "sides": ["trained", "base"], "temperature": 1}).json()["id"]
    shown = api.get(path).json()
    (turn,) = shown["turns"]
    assert shown["alive"] and turn["id"] == id and not turn["done"]
    assert api.get(f"{path}?have={shown['tag']}").status_code in (200, 204)
    tokens = {"prompt": "P", "prompt_tokens": [[1, "P"]], "tokens": [[2, "<b>", 0.5]]}
    chat_files.append(job.path / OUTPUTS, {"details": [id, "trained"], **tokens})
    chat_files.append(job.path / OUTPUTS, {"id": id, "side": "trained", "end": "limit", "text": "<b>", "tokens": 1})
    assert api.get(path).json()["turns"][0]["outputs"]["trained"] == {"end": "limit", "text": "<b>", "tokens": 1}
    assert api.get(f"{path}/tokens?turn={id}&side=trained").json() == tokens
    assert api.get(f"{path}/tokens?turn={id}&side=base").status_code == 404

    assert api.post(f"{path}/requests", json={"kind": STOP, "target": id}).status_code == 200
    assert api.post(f"{path}/requests", json={"kind": CLEAR}).status_code == 200
    assert api.get(path).json()["turns"] == []
    for body, status in (
        ({"prompt": "x" * 70_000}, 422),
        ({"prompt": "x", "step": 7}, 422),
        ({"prompt": "x", "kind": "other"}, 422),
        ({"prompt": 1}, 400),
        ({"prompt": "x", "temperature": -1}, 422),
    ):
        response = api.post(f"{path}/requests", json=body)
        assert response.status_code == status and response.json()["error"].endswith("."), response.text
    assert api.post(f"{path}/end", json={}).status_code == 200
    wait_for_end(job)
    assert not api.get(path).json()["alive"]


def test_turns_are_sent_after_a_change_only(tmp_path, api, monkeypatch):
    """The free memory, which the card also has, changes all the time."""
    path, free = f"/api/runs/{make_run(tmp_path / 'runs').id}/chat", 1
    monkeypatch.setattr(inference.ChatMemory, "text", property(lambda self: f"{free} GiB is free."))
    first = api.get(path).json()
    free = 2
    second = api.get(f"{path}?have={first['tag']}").json()
    assert first["turns"] == [] and "turns" not in second and second["memory"]["text"] == "2 GiB is free."
    assert api.get(f"{path}?have={second['tag']}").status_code == 204


def wait_for_end(job):
    wait_for(lambda: job.state not in ALIVE)


def test_a_request_starts_the_chat_again_with_its_conversation(tmp_path, api):
    run = make_run(tmp_path / "runs")
    path = f"/api/runs/{run.id}/chat"
    api.post(path, json={})
    api.post(f"{path}/requests", json=PROMPT)
    api.post(f"{path}/end", json={})
    wait_for_end(chat.current(run))
    api.post(f"{path}/requests", json={"prompt": "More"})
    shown = api.get(path).json()
    assert shown["alive"] and [turn["prompt"] for turn in shown["turns"]] == ["Hello", "More"]
    api.post(f"{path}/end", json={})
    wait_for_end(chat.current(run))


def test_a_run_without_a_model_has_no_chat(tmp_path, api):
    run = make_run(tmp_path / "runs", files=())
    assert api.get(f"/api/runs/{run.id}/chat").status_code == 409
    assert api.post(f"/api/runs/{run.id}/chat", json={}).status_code == 409
    assert not list(run.path.glob("jobs/2*"))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--step", "7"], "No checkpoint of step 7 can be loaded. Loadable steps: 2."),
        (["--completion", "a", "--prompt", "p"], "--completion needs a reward model"),
        (["--json"], "Set --prompt"),
        (["--prompt", "p", "--tools", "/nowhere.json"], "--tools /nowhere.json cannot be read: No such file"),
        (["--prompt", "p", "--chat-template-kwargs", "{"], "--chat-template-kwargs is not valid JSON"),
        (["--prompt", "p", "--temperature", "-1"], "The temperature must be from 0 to 10."),
    ],
)
def test_the_command_refuses_what_cannot_be_generated(tmp_path, capsys, words, error):
    run = make_run(tmp_path)
    assert main(["chat", str(run.path), *words]) == 2
    assert error in capsys.readouterr().err
    assert not list(run.path.glob("jobs/2*"))


@pytest.mark.parametrize(("side", "is_named"), [("trained", True), ("base", False)])
def test_the_command_says_why_a_chat_has_ended(tmp_path, capsys, monkeypatch, side, is_named):
    run = make_run(tmp_path)
    shutil.rmtree(run.path / "model")
    monkeypatch.setitem(jobs.MODULES, jobs.CHAT, "backend.no_such_module")
    assert main(["chat", str(run.path), "--prompt", "p", "--models", side]) == 2
    error = capsys.readouterr().err.strip()
    assert error and ("Using its newest checkpoint, of step 2" in error) == is_named
    assert not [path for path in Path(run.path).glob("jobs/2*") if (path / "running").exists()]


def test_earlier_turns_are_known_from_the_first_examples(tmp_path):
    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    cases = ([[user, assistant]], False), ([[user, assistant] * 2], True), ([[user]], True)
    for lines, expected in (*cases, ([[user], [user, assistant]], False)):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in lines))
        spec = edit(RunSpec(), {"data.source": "files", "data.files": (str(tmp_path / "data.jsonl"),)})
        system_prompt._of_examples.cache_clear()
        assert system_prompt.has_earlier_turns(spec) == expected, "unreadable examples: assume that it has"


def test_a_model_that_was_trained_on_plain_text_continues_texts(tmp_path):
    """Whether data.format names the format or detects it. Evaluations of such a run generate nothing."""
    conversation = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    for name, example in (("text", {"text": "Once."}), ("chat", conversation)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(example))
    text, turns = ({"source": "files", "files": (str(tmp_path / f"{name}.jsonl"),)} for name in ("text", "chat"))
    own = {f"data.{name}": value for name, value in text.items()}
    cases = {
        "auto": (own, "text"),
        "explicit": ({**own, "data.format": "text"}, "text"),
        "both": ({**own, "data.sources": ({}, turns)}, "chat"),
        "chat": ({f"data.{name}": value for name, value in turns.items()}, "chat"),
        "gone": ({**own, "data.files": (str(tmp_path / "gone.jsonl"),)}, "chat"),
    }
    runs = {name: make_run(tmp_path / name, {**LORA, **changes}) for name, (changes, _) in cases.items()}
    for name, (_, mode) in cases.items():
        run = runs[name]
        assert (chat.offer(run).mode, evaluation.offer(run).generates) == (mode, mode == "chat"), name
    settings = evaluation.Settings(regex="x", data=str(tmp_path / "chat.jsonl"))
    assert evaluation.problem(runs["auto"], settings) == "", "the format of this file is detected, too"
    assert "there are no outputs for a regular expression" in evaluation.problem(runs["explicit"], settings)
