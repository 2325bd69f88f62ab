"""What can be done with an output of a chat: its reasoning, code that generates it again, and a prompt to evaluate."""

import json
from pathlib import Path

import pytest
from test_chat import LORA, make_run
from test_serve import end, environment, export, started  # noqa: F401 - a fixture

from backend.models import chat_code, chat_files, evaluation, kept_prompts, trained
from backend.models.chat_files import OUTPUTS, TUNED, Request
from backend.models.conversation import opened_by, split_reasoning
from backend.runs import jobs
from backend.runs.folder import RunError

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": 'Say "hi"\n'}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"strict": True, "default": None}}}


PROMPT = Request(prompt="p")


def answered(run, request=PROMPT, details=None, **output):
    """The id of a turn with an output."""
    job = jobs.create(run, jobs.CHAT, {}, {}, {})
    id = chat_files.send(job.path, request)
    rendered = {"prompt": "P", "messages": MESSAGES, "is_plain": True, "stops": [2, 7]} if details is None else details
    chat_files.append(job.path / OUTPUTS, {"details": [id, TUNED], **rendered, "prompt_tokens": [], "tokens": []})
    shown = {"end": "limit", "limit": 5, "text": "<think>r</think>a", **output}
    chat_files.append(job.path / OUTPUTS, {"id": id, "side": TUNED, **shown})
    return id


def program(run, id):
    code = chat_code.of_output(run, id)["python"]
    compile(code, "python", "exec")
    return code


@pytest.mark.parametrize(
    ("text", "opened", "found"),
    [
        ("Answer", "", None),
        ("<think>\nr\n</think>\n\na", "", ("\nr\n", "\n\na")),
        ("<think>\nnot yet", "", ("\nnot yet", "")),
        ("r\n</think>\na", "<think>", ("r\n", "\na")),
        ("still", "<think>", ("still", "")),
        ("In HTML, write </think> to close it.", "", None),
        ("[THINK]r[/THINK]a", "", ("r", "a")),
        (
            "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>a",
            "",
            ("r", "a"),
        ),
        (
            "<|START_THINKING|>r<|END_THINKING|>\n<|START_RESPONSE|>a<|END_RESPONSE|>",
            "",
            ("r", "a"),
        ),
        ("r<|END_THINKING|><|START_RESPONSE|>a", "<|START_THINKING|>", ("r", "a")),
        ("say <think> or [/THINK]", "", None),
    ],
)
def test_reasoning_is_shown_apart(text, opened, found):
    assert split_reasoning(text, opened) == found


def test_a_prompt_that_begins_the_reasoning():
    assert opened_by("<|im_start|>assistant\n<think>\n") == "<think>"
    assert opened_by("<think>\n\n</think>\n\n") == ""


@pytest.mark.parametrize(
    ("written", "reasoning", "answer"),
    [
        ("<think>r</think>a<|x|>", "r", "a<|x|>"),
        ("<|channel|>final<|message|>a", None, "a"),
        ("<|START_RESPONSE|>a<|END_RESPONSE|>", None, "a"),
        ("a<|x|>", None, None),
    ],
)
def test_the_page_gets_reasoning_and_answer(tmp_path, written, reasoning, answer):
    run = make_run(tmp_path)
    answered(run, written=written)
    output = chat_files.read_turns(jobs.find_all(run, jobs.CHAT)[0].path, "page")[0].as_json()["outputs"][TUNED]
    assert (output.get("reasoning"), output.get("answer")) == (reasoning, answer)


def test_code_of_messages_with_tools(tmp_path):
    run = make_run(tmp_path)
    request = Request(prompt="p", tools=json.dumps([TOOL]), template_kwargs={"enable_thinking": False}, seed=3)
    code = program(run, answered(run, request))
    assert '{"role": "user", "content": "Say \\"hi\\"\\n"},' in code
    assert '"parameters": {"strict": True, "default": None}' in code
    assert "messages, tools=tools, enable_thinking=False, add_generation_prompt=True" in code
    assert "AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32" in code
    assert "max_new_tokens=5, do_sample=False, eos_token_id=[2, 7]" in code and "manual_seed" not in code
    assert "\nmodel.generation_config = settings  #" in code, "no penalty of the model's own"


def test_code_names_a_folder_as_python_reads_it():
    code = trained.loading_code(Path("/runs/\U0001f600"), False, False, (), "", False)
    assert "/runs/\U0001f600" in code and "\\u" not in code


def test_code_of_a_sampled_output_with_a_quantized_base_model(tmp_path):
    run = make_run(tmp_path, {**LORA, "method.quantization": "nf4"})
    resolved = json.loads((run.path / "resolved.json").read_text())
    (run.path / "resolved.json").write_text(json.dumps({**resolved, "compute_dtype": "bf16", "device": "cuda"}))
    code = program(run, answered(run, Request(prompt="p", temperature=0.5, top_p=0.9), seed=11))
    assert "do_sample=True, temperature=0.5, top_p=0.9, top_k=0" in code and "torch.manual_seed(11)" in code
    assert 'load_in_4bit=True, bnb_4bit_quant_type="nf4"' in code and "bnb_4bit_compute_dtype=torch.bfloat16" in code
    assert 'device_map="auto"' in code and "torch.autocast(model.device.type, dtype=torch.bfloat16)" in code


def test_code_of_a_text_and_of_what_transformers_renders_differently(tmp_path):
    run = make_run(tmp_path)
    other = program(run, answered(run, details={"prompt": "R\n", "messages": MESSAGES, "is_plain": False}))
    assert 'prompt = "R\\n"' in other and "add_special_tokens=False" in other
    text = program(run, answered(run, details={"prompt": "Once"}))
    assert 'tokenizer(prompt, return_tensors="pt")' in text and "without the EOS token" not in text
    assert "without the EOS token" in program(run, answered(run, details={"prompt": "Once", "adds_eos": True}))


def test_code_that_needs_modified_base_weights_is_refused(tmp_path):
    run = make_run(tmp_path)
    config = {"init_lora_weights": "pissa", "base_model_name_or_path": "b"}
    (run.path / "checkpoints/checkpoint-2/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="base weights that PiSSA"):
        chat_code.of_output(run, answered(run, Request(prompt="p", step=2)))
    with pytest.raises(RunError, match="has no output"):
        chat_code.of_output(run, "other")


def test_requests_to_the_server_of_the_run(tmp_path, environment):  # noqa: F811
    run = make_run(tmp_path)
    export(run)
    job, shown = started(run)
    request = Request(prompt="p", tools=json.dumps([TOOL]), template_kwargs={"enable_thinking": False})
    code = chat_code.of_output(run, answered(run, request))
    sampled = chat_code.of_output(run, answered(run, Request(prompt="p", temperature=0.5, top_p=0.9), seed=11))
    (job.path / "serve.json").write_text(json.dumps({"engine": "vllm", "name": "n", "folder": "model"}))
    by_vllm = chat_code.of_output(run, answered(run, Request(prompt="p")))
    end(job)
    assert '"top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": 11' in sampled["curl"], "as in the chat"
    assert 'extra_body={"top_k": 0, "min_p": 0.0}' in sampled["openai"] and "penalty" not in sampled["curl"]
    assert '"repetition_penalty": 1.0' in by_vllm["curl"] and by_vllm["served"].startswith("vLLM serves model ")
    assert f"{shown['address']}/chat/completions" in code["curl"] and '"strict": true' in code["curl"]
    assert '"temperature": 0.0, "max_tokens": 256' in code["curl"]
    assert code["served"].startswith("llama.cpp serves ") and ".gguf, which is rounded" in code["served"]
    compile(code["openai"], "python", "exec")
    assert 'extra_body={"chat_template_kwargs": {"enable_thinking": False}}' in code["openai"]


def test_kept_prompts(tmp_path):
    run = make_run(tmp_path)
    path = tmp_path / "evaluation_prompts.jsonl"
    id = answered(run, Request(prompt="p", tools=json.dumps([TOOL]), template_kwargs={"enable_thinking": False}))
    assert kept_prompts.keep(run, id, " right \n") == {"path": str(path), "count": 1}
    assert json.loads(path.read_text()) == {
        "prompt": MESSAGES, "completion": [{"role": "assistant", "content": "right"}], "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().rstrip())  # as some editors leave it
    assert kept_prompts.keep(run, id, "other")["count"] == 2
    with pytest.raises(RunError, match="already in"):
        kept_prompts.keep(run, id, "right")
    assert len(list(map(json.loads, path.read_text().splitlines()))) == 2
    offer = evaluation.offer(run)
    assert (offer.kept_file, offer.kept) == (str(path), 2)
    for reference, turn, words in ((" ", id, "reference is empty"), ("x", "gone", "no output")):
        with pytest.raises(RunError, match=words):
            kept_prompts.keep(run, turn, reference)
    with pytest.raises(RunError, match="continues texts"):
        kept_prompts.keep(run, answered(run, details={"prompt": "Once"}), "x")


def test_a_prompt_that_cannot_be_written_is_not_lost_silently(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "evaluation_prompts.jsonl").mkdir()
    with pytest.raises(RunError, match=r"was not kept: .*evaluation_prompts.jsonl cannot be written"):
        kept_prompts.keep(run, answered(run), "x")
    assert evaluation.offer(run).kept == 0
