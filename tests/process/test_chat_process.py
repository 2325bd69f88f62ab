"""The chat with the models of a run: what it generates, and how its process ends."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from test_trained_model import run_code
from tokenizers.processors import TemplateProcessing
from training_runs import log_text, make_spec, result
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template

from backend.config.options import edit
from backend.inference import examples, generation
from backend.inference.loading import Models
from backend.machine import Machine
from backend.memory import inference
from backend.models import chat, chat_code, chat_files, kept_prompts, trained
from backend.models.chat_files import BASE, TUNED, Request
from backend.models.evaluation import Settings
from backend.models.spec import read_spec
from backend.presets import dump
from backend.runs import BASE as WEIGHTS
from backend.runs import MODEL, PLAN, RESOLVED, SPEC, Plan, jobs, processes
from backend.runs.folder import ALIVE, Run, RunError
from backend.train.run_log import TrainError

NEW_TOKENS = 16
TRAINED = {
    "save.final_model": True, "save.strategy": "steps", "save.steps": 2, "eval.num_generations": 2,
    "eval.per_device_eval_batch_size": 1, "eval.max_new_tokens": NEW_TOKENS, "eval.strategy": "steps", "eval.steps": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "pissa": {"lora.init": "pissa"},
    "full": {"method.kind": "full"},
    "text": {"method.kind": "full", "train.stage": "pretraining", "eval.num_generations": 0},
    "dora": {"lora.use_dora": True},
    "nf4": {"method.quantization": "nf4"},
    "modules": {"lora.modules_to_save": ["lm_head"]},
}
GPU = {"GPU-of-a-test": "GPU 0"}
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])


@pytest.fixture(scope="module")
def run(fork_server: ForkServer, root: Path) -> Run:
    """A run that has trained an adapter."""
    return Run(fork_server.train(root / "adapter", make_spec(TRAINED)))


def test_an_adapter_is_not_used_on_other_base_weights(run: Run, tmp_path: Path) -> None:
    other = Run(shutil.copytree(run.path, tmp_path / "other", ignore=shutil.ignore_patterns("jobs")))
    recorded = json.loads((other.path / WEIGHTS).read_text())
    (other.path / WEIGHTS).write_text(json.dumps({**recorded, "fingerprint": "0" * 64}))
    with pytest.raises(TrainError, match="base model"):
        Models(other, lambda text: None).load(None, TUNED)


def test_the_base_model_of_a_final_pissa_adapter_has_the_compute_dtype(run: Run, tmp_path: Path) -> None:
    """As in training, and as the memory is shown: only the initialization of a checkpoint needs it in fp32."""
    other = Run(shutil.copytree(run.path, tmp_path / "other", ignore=shutil.ignore_patterns("jobs")))
    (other.path / SPEC).write_text(dump(edit(read_spec(run), {"lora.init": "pissa"})))
    (other.path / RESOLVED).write_text(json.dumps({**run.resolved(), "compute_dtype": "bf16"}))
    loaded = Models(other, lambda text: None).load(None, TUNED).model
    dtypes = {(".lora_" in name, parameter.dtype) for name, parameter in loaded.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert "parameters in bf16" in inference.of_chat(other, Machine()).text


@pytest.fixture
def python(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a chat is forked."""
    monkeypatch.setattr(sys, "executable", str(fork_server.python))


@pytest.fixture
def start(python: None) -> Iterator[Callable[..., Run]]:
    """Starts chats; asserts that they leave no process."""
    started: list[Run] = []

    def start_one(run: Run, idle_seconds: float = 60) -> Run:
        started.append(chat.start(run, idle_seconds))
        return started[-1]

    yield start_one
    for job in started:
        if job.path.is_dir() and job.state in ALIVE:
            job.stop(save=False)
            wait_for(lambda job=job: job.state not in ALIVE)
        assert not processes.run_processes(job.path)


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(job: Run, request: Request) -> dict[str, dict[str, Any]]:
    """The outputs of a request, with their tokens."""
    id = chat_files.send(job.path, request)

    def turn() -> chat_files.Turn:
        return next(t for t in chat_files.read_turns(job.path, request.conversation) if t.request.id == id)

    wait_for(lambda: turn().is_done or job.state not in ALIVE)
    assert turn().is_done, log_text(job.path)
    details = {side: chat_files.details(job.path, id, side) or {} for side in request.sides}
    return {
        side: {**details[side], **output, "tokens_of": details[side].get("tokens", [])}
        for side, output in turn().outputs.items()
    }


def assert_is_of(model: Any, details: dict[str, Any]) -> None:
    """The tokens are those that a model generates by itself for the same prompt, and their probabilities too."""
    assert "".join(text for _, text in details["prompt_tokens"]) == details["prompt"]
    ids = torch.tensor([[token for token, _ in details["prompt_tokens"]]])
    more = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **more)[0, ids.shape[1] :]
        scores = model(ids).logits[0, -1]
    assert made.tolist() == [token for token, _, _ in details["tokens"]]
    token, _, probability = details["tokens"][0]
    assert probability == pytest.approx(float(scores.softmax(-1)[token]), abs=1e-5)


def test_a_chat_generates_what_training_and_the_base_model_do(run: Run, tiny: Path, start: Callable[..., Run]) -> None:
    samples = result(run.path)["samples"]
    job = start(run)
    for sample in samples:
        request = Request(prompt=sample["prompt"], sides=(TUNED, BASE), max_new_tokens=NEW_TOKENS, history=False)
        outputs = ask(job, request)
        assert outputs[TUNED]["text"].strip() == sample["after"]
        assert outputs[BASE]["text"].strip() == sample["before"]
        assert outputs[TUNED]["limit"] == NEW_TOKENS and outputs[TUNED]["end"] in ("limit", "stop token")
        assert [p for *_, p in outputs[TUNED]["tokens_of"]] != [p for *_, p in outputs[BASE]["tokens_of"]]
    turns = chat_files.read_turns(job.path, "page")
    details = chat_files.details(job.path, turns[0].request.id, BASE)
    assert details
    assert_is_of(AutoModelForCausalLM.from_pretrained(tiny), details)
    assert "As JSON" in details["prompt"], "the system prompt of the examples"

    followed = ask(job, Request(prompt="Again", system="Short.", step=2, max_new_tokens=4, temperature=1.0, seed=7))
    assert followed[TUNED]["prompt"].count("<|im_start|>user") == 3 and "As JSON" not in followed[TUNED]["prompt"]
    assert followed[TUNED]["tokens"] == 4 and followed[TUNED]["seed"] == 7
    again = ask(job, Request(prompt="Again", system="Short.", step=2, max_new_tokens=4, temperature=1.0, seed=7,
                             replaces=chat_files.read_turns(job.path, "page")[-1].request.id))  # fmt: skip
    assert again[TUNED]["text"] == followed[TUNED]["text"]
    assert len(chat_files.read_turns(job.path, "page")) == 3
    long = ask(job, Request(prompt="word " * 5000, conversation="other"))
    assert "the model's context length is" in long[TUNED]["error"] and "Shorten the prompt" in long[TUNED]["error"]
    tools = ask(job, Request(prompt="x", tools=TOOLS, conversation="other"))
    assert "does not read tools" in tools[TUNED]["error"] and "Clear the field Tools" in tools[TUNED]["error"]
    gone = ask(job, Request(prompt="x", step=99, conversation="other"))
    assert "checkpoint of step 99" in gone[TUNED]["error"]


def test_tools_reasoning_code_and_kept_prompts(
    fork_server: ForkServer, run: Run, start: Callable[..., Run], root: Path
) -> None:
    """With Qwen3's template, which reads tools and enable_thinking."""
    copied = Run(shutil.copytree(run.path, root / "with-tools" / run.id, ignore=shutil.ignore_patterns("jobs")))
    (copied.path / MODEL / "chat_template.jinja").write_text(qwen3_chat_template)
    job = start(copied)
    off = {"tools": TOOLS, "template_kwargs": {"enable_thinking": False}, "max_new_tokens": NEW_TOKENS}
    asked = ask(job, Request(prompt="Is it warm?", system="Short.", **off))[TUNED]
    assert '"name": "weather"' in asked["prompt"] and asked["prompt"].endswith("<think>\n\n</think>\n\n")
    loaded = chat_files.loaded(job.path)
    assert (loaded["tools"], loaded["thinking"]) == (True, "enable_thinking") and loaded["seconds"] > 0
    told = ask(job, Request(prompt="21 degrees", role="tool", system="Short.", **off))[TUNED]
    assert "<tool_response>\n21 degrees\n</tool_response>" in told["prompt"] and told["is_plain"]
    wrong = ask(job, Request(prompt="x", template_kwargs={"mood": 1}, conversation="other"))[TUNED]
    assert "remove mood, which" in wrong["error"]

    turn = chat_files.read_turns(job.path, "page")[-1].request.id
    code = chat_code.of_output(copied, turn)["python"]
    assert "tools = [" in code and "enable_thinking=False" in code
    assert run_code(fork_server, root / "chat-code", code).strip() == told["text"].strip()

    kept = kept_prompts.keep(copied, turn, "It is warm.")
    assert kept == {"path": str(root / "with-tools/evaluation_prompts.jsonl"), "count": 1}
    tokenizer = AutoTokenizer.from_pretrained(copied.path / MODEL)
    settings = Settings(data=kept["path"], general=False)
    for changes in ({}, {"train.stage": "dpo", "data.builtin": "train-pairs", "data.system_prompt": "Other."}):
        (item,) = examples.read(edit(read_spec(copied), changes), settings, tokenizer, print)
        assert item.prompt and item.prompt.text == told["prompt"] and item.prompt.reference == "It is warm."


def test_the_memory_of_a_chat_is_known_before(run: Run, start: Callable[..., Run]) -> None:
    """The weights; the libraries are shared with the fork server, so the process has no memory of its own for them."""
    memory = inference.of_chat(run, Machine())
    model = Models(run, lambda text: None).load(None, TUNED).model
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(row.bytes for row in memory.rows[:-1]) == pytest.approx(size, rel=0.02)


def test_a_stop_ends_an_output_and_the_process(run: Run, start: Callable[..., Run]) -> None:
    job = start(run)
    long = Request(prompt="x", max_new_tokens=30_000, conversation="long")
    id = chat_files.send(job.path, long)

    def begun(conversation: str) -> bool:
        return any(turn.outputs.get(TUNED, {}).get("text") for turn in chat_files.read_turns(job.path, conversation))

    wait_for(lambda: begun("long"))
    chat_files.send(job.path, Request(kind=chat_files.STOP, target=id))
    wait_for(lambda: chat_files.read_turns(job.path, "long")[0].is_done, 10)
    output = chat_files.read_turns(job.path, "long")[0].outputs[TUNED]
    assert output["end"] == "stopped" and output["text"] and output["tokens"] < output["limit"]
    assert job.state == "running"

    chat_files.send(job.path, replace(long, conversation="second"))
    wait_for(lambda: begun("second"))
    job.stop(save=False)
    wait_for(lambda: job.state not in ALIVE, 15)
    assert job.state == "done" and job.result()["text"] == "The chat was stopped."
    assert chat_files.read_turns(job.path, "second")[0].outputs[TUNED]["end"] == "stopped"
    assert not processes.run_processes(job.path)


def test_an_idle_chat_ends_and_keeps_its_conversation(run: Run, start: Callable[..., Run]) -> None:
    job = start(run, 1)
    ask(job, Request(prompt="Alone", conversation="shell", max_new_tokens=2))
    chat_files.send(job.path, Request(kind=chat_files.CLEAR))
    ask(job, Request(prompt="Hello", max_new_tokens=2))
    wait_for(lambda: job.state not in ALIVE, 30)
    assert job.state == "done", log_text(job.path)
    assert job.result()["text"] == "The chat ended because nobody used it for 1 second."
    later = start(run)
    (turn,) = chat_files.read_turns(later.path, "page")
    assert turn.request.prompt == "Hello" and turn.is_done and not chat_files.read_turns(later.path, "shell")
    assert chat_files.details(later.path, turn.request.id, TUNED)
    assert [found.id for found in jobs.find_all(run, jobs.CHAT)] == [later.id]


def test_a_waiting_run_takes_the_device(
    run: Run, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jobs, "place", lambda *_, **__: ({"OMP_NUM_THREADS": "1"}, GPU))
    job = start(run)
    wait_for(lambda: job.state == "running")
    waiting = Run.create(tmp_path / "runs", "next", Plan((sys.executable, "-c", ""), devices=GPU), datetime.now())
    waiting.start()
    assert waiting.state in ("queued", "done") and (waiting.state == "done" or job.id in waiting.waiting()["reason"])
    wait_for(lambda: job.state not in ALIVE, 30)
    assert job.result()["text"] == f"The chat ended because {waiting.id} was waiting for GPU 0."
    assert log_text(job.path).rstrip().endswith(job.result()["text"])
    wait_for(lambda: waiting.state not in ALIVE, 30)
    assert waiting.state == "done"


def test_a_run_is_renamed_and_deleted_during_its_chat(run: Run, start: Callable[..., Run], tmp_path: Path) -> None:
    copied = Run(shutil.copytree(run.path, tmp_path / "copied", ignore=shutil.ignore_patterns("jobs")))
    (copied.path / PLAN).write_text("{}")
    job = start(copied)
    ask(job, Request(prompt="Hello", max_new_tokens=2))
    copied.path.rename(tmp_path / "renamed")
    renamed = Run(tmp_path / "renamed")
    moved = chat.current(renamed)
    assert moved and moved.state == "running"
    output = ask(moved, Request(prompt="Hello", step=2, max_new_tokens=2))[TUNED]
    assert output["end"] in ("limit", "stop token") and output["step"] == 2
    chat_files.send(moved.path, Request(prompt="x", max_new_tokens=30_000))
    renamed.delete()
    wait_for(lambda: not processes.run_processes(job.path) and not processes.run_processes(moved.path), 20)
    assert not renamed.path.exists()


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(fork_server: ForkServer, root: Path, start: Callable[..., Run], kind: str) -> None:
    run = Run(fork_server.train(root / kind, make_spec({**TRAINED, **KINDS[kind]})))
    job = start(run)
    offer = chat.offer(run)
    assert offer.mode == ("text" if kind == "text" else "chat") and len(offer.steps) == 3
    samples = result(run.path)["samples"] or [{"prompt": "Once upon a time", "before": None, "after": None}]
    for step in offer.steps:
        for sample in samples:
            request = Request(
                prompt=sample["prompt"], sides=(TUNED, BASE), step=step, max_new_tokens=NEW_TOKENS, history=False
            )
            outputs = ask(job, request)
            assert not [output for output in outputs.values() if "error" in output]
            if step in (None, 3) and sample["after"] is not None and kind != "full":
                assert outputs[TUNED]["text"].strip() == sample["after"], step
            if sample["before"] is not None:
                assert outputs[BASE]["text"].strip() == sample["before"], step
        turn = chat_files.read_turns(job.path, "page")[-1].request.id
        if kind == "pissa" and step is not None:
            with pytest.raises(RunError, match="base weights that PiSSA"):
                chat_code.of_output(run, turn)
            continue
        made = run_code(fork_server, root / f"code-{kind}-{step}", chat_code.of_output(run, turn)["python"])
        assert made.strip() == outputs[TUNED]["text"].strip()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_reward_model_scores_two_answers(
    fork_server: ForkServer, root: Path, start: Callable[..., Run], kind: str
) -> None:
    reward = {"train.stage": "reward", "data.builtin": "train-pairs", "method.kind": kind, "eval.num_generations": 0}
    run = Run(fork_server.train(root / f"reward-{kind}", make_spec({**TRAINED, **reward})))
    offer = chat.offer(run)
    assert offer.mode == "score" and offer.without_base
    output = ask(start(run), Request(prompt="Where?", answers=("Here.", "There it is.")))[TUNED]
    assert len(output["scores"]) == 2 and output["scores"][0] != output["scores"][1], output
    if kind == "full":
        folder = run.path / "model"
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
        if offer.system:
            turns = [{"role": "system", "content": offer.system}, *turns]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            assert output["scores"][0] == pytest.approx(float(model(**ids).logits[0, 0]), abs=1e-4)


def test_a_text_is_continued_also_if_its_tokenizer_adds_an_eos_token(tiny: Path, tmp_path: Path) -> None:
    """As LlamaTokenizer with add_eos_token does. The shown code continues the same ids."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    plain, end = tokenizer("Once", add_special_tokens=False)["input_ids"], str(tokenizer.eos_token)
    assert generation.text_ids(tokenizer, "Once") == (tokenizer("Once")["input_ids"], False)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert tokenizer("Once")["input_ids"] == [*plain, tokenizer.eos_token_id]
    assert generation.text_ids(tokenizer, "Once") == (plain, True)
    assert generation.text_ids(tokenizer, f"Once{end}")[0][-1] == tokenizer.eos_token_id, "the user's own"
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "add_eos_token": False}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("Once")["input_ids"][-1] == tokenizer.eos_token_id and trained._adds_eos(tmp_path)
    inputs = tokenizer("Once", return_tensors="pt")
    exec(trained.WITHOUT_EOS, {"inputs": inputs})
    assert inputs["input_ids"].tolist() == [plain] and inputs["attention_mask"].shape == inputs["input_ids"].shape


def test_the_text_of_tokens(tiny: Path) -> None:
    """Also where a character has several tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "Zürich → 東京 \U0001f686 ok"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(generation.pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert json.dumps(generation.pieces(tokenizer, ids)).count("\\ufffd") == 0
