"""Code that generates an output of a chat again: a Python program with transformers and peft, and requests to the
server of an exported GGUF file.

At temperature 0 the program generates the same text, since it has the rendered conversation, the dtype and the stop
tokens of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.models import chat, chat_files, conversation, serve, trained
from backend.models.chat_files import PAGE, TUNED, Request
from backend.models.python_text import arguments, literal
from backend.models.spec import read_spec
from backend.models.trained import TO_DEVICE, WITHOUT_EOS
from backend.runs.folder import ALIVE, Run, RunError

DTYPES = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}  # names of the compute dtype
MODIFIED = (
    "This checkpoint belongs to base weights that PiSSA, OLoRA, CorDA or LoftQ has modified, and transformers and peft "
    "alone cannot load the checkpoint. Generate an output with the final model, and copy the code of that output."
)


def of_output(run: Run, id: str) -> dict[str, str]:
    """`python`, and, if a model of the run is being served now, `curl` and `openai`, for the trained model's output
    of a turn, and `served`, which says what is served; '' for those that do not apply. Raises RunError."""
    turn, details, output = find(run, id)
    server = serve.current(run)
    requests: Mapping[str, str] = {}
    if server and server.state in ALIVE:
        requests = serve.requests(server, _body(turn.request, details, output, serve.engine_in(server)))
    return {
        "python": _program(run, turn.request, details, output),
        "curl": requests.get("curl", ""),
        "openai": requests.get("python", ""),
        "served": serve.differs(server) if server and requests else "",
    }


def find(run: Run, id: str) -> tuple[chat_files.Turn, dict[str, Any], dict[str, Any]]:
    """A turn of the page's conversation, and the details and the end of the trained model's output. Raises RunError."""
    job = chat.current(run)
    turns = chat_files.read_turns(job.path, PAGE) if job else []
    turn = next((turn for turn in turns if turn.request.id == id), None)
    details = chat_files.details(job.path, id, TUNED) if job and turn else None
    if not turn or not details or "end" not in turn.outputs.get(TUNED, {}):
        raise RunError("This turn has no output of the trained model. Generate one first.")
    return turn, details, turn.outputs[TUNED]


def _program(run: Run, request: Request, details: Mapping[str, Any], output: Mapping[str, Any]) -> str:
    model = trained.at_step(run, request.step)
    if model is None:
        raise RunError(trained.not_loadable(request.step, (found.step for found in trained.models(run))))
    if model.is_residual:
        raise RunError(MODIFIED)
    spec, resolved = read_spec(run), run.resolved()
    dtype = DTYPES.get(str(resolved.get("compute_dtype")), DTYPES["fp32"])
    place = "cpu" if resolved.get("device") == "cpu" else "auto"
    quantized = _quantization(spec, dtype) if model.base else ""
    options = f"dtype={dtype}, device_map={literal(place)}{quantized}"
    names = ("BitsAndBytesConfig", "GenerationConfig") if quantized else ("GenerationConfig",)
    runs_code = spec.model.trust_remote_code
    loading = trained.loading_code(model.folder, bool(model.base), False, names, options, runs_code)
    seed = f"torch.manual_seed({output.get('seed')})\n" if request.temperature > 0 else ""
    autocast = f"with torch.autocast(model.device.type, dtype={dtype}):\n    " if dtype != DTYPES["fp32"] else ""
    settings = f"settings = GenerationConfig({_settings(request, details, output)})\n{INSTEAD}"
    prompt = _prompt_code(request, details)
    loading += KEEP_LAYOUT if "load_in_4bit" in quantized and place == "cpu" else ""
    return f"import torch\n{loading}{prompt}{TO_DEVICE}{settings}{seed}{autocast}{GENERATE}"


def _quantization(spec: RunSpec, dtype: str) -> str:
    """The argument of from_pretrained that quantizes the base model as in training; '' without quantization."""
    method = spec.method
    if method.kind != "lora" or not registry.QUANTIZATIONS[method.quantization].bits:
        return ""
    if method.quantization not in registry.FOUR_BIT:
        return ", quantization_config=BitsAndBytesConfig(load_in_8bit=True)"
    names = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": method.quantization,
        "bnb_4bit_use_double_quant": method.bnb_4bit_use_double_quant,
    }
    return f", quantization_config=BitsAndBytesConfig({arguments(names)}, bnb_4bit_compute_dtype={dtype})"


def _settings(request: Request, details: Mapping[str, Any], output: Mapping[str, Any]) -> str:
    sampling: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        sampling = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
    stops = details.get("stops") or None
    values = {"max_new_tokens": output.get("limit", request.max_new_tokens), **sampling, "eos_token_id": stops}
    return f"{arguments(values)}, pad_token_id=tokenizer.pad_token_id"


def _prompt_code(request: Request, details: Mapping[str, Any]) -> str:
    """Code that tokenizes the messages with the chat template, or the rendered text if transformers alone renders a
    different one."""
    if not details.get("is_plain"):
        special = ", add_special_tokens=False" if "messages" in details else ""
        text = literal(details["prompt"])
        code = f'prompt = {text}\ninputs = tokenizer(prompt, return_tensors="pt"{special})\n'
        return code + (WITHOUT_EOS if details.get("adds_eos") else "")
    turns = "".join(f"    {literal(turn)},\n" for turn in details["messages"])
    tools = [f"    {literal(tool)},\n" for tool in conversation.parse_tools(request.tools)]
    code = f"messages = [\n{turns}]\n" + (f"tools = [\n{''.join(tools)}]\n" if tools else "")
    given = [*(["tools=tools"] if tools else []), *filter(None, [arguments(request.template_kwargs)])]
    rest = "".join(f"{argument}, " for argument in given)
    return (
        f"{code}inputs = tokenizer.apply_chat_template(\n    messages, {rest}add_generation_prompt=True, "
        'return_tensors="pt", return_dict=True\n)\n'
    )


def _body(request: Request, details: Mapping[str, Any], output: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The fields of a request to the server, besides the model's name."""
    body: dict[str, Any] = {"messages": details["messages"]} if "messages" in details else {"prompt": details["prompt"]}
    if tools := conversation.parse_tools(request.tools):
        body["tools"] = tools
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    body |= {"temperature": request.temperature, "max_tokens": request.max_new_tokens}
    if engine == serve.VLLM:  # it has the model's own penalty otherwise
        body["repetition_penalty"] = 1.0
    if request.temperature > 0:  # llama.cpp has a top_k of 40 and a min_p of 0.05 otherwise, vLLM those of the model
        body |= {"top_p": request.top_p, "top_k": 0, "min_p": 0.0, "seed": output.get("seed")}
    return body


# As in train/patches/bitsandbytes_cpu_layout.py.
KEEP_LAYOUT = """\
for module in model.modules():  # bitsandbytes 0.50 rounds the scales of 4-bit weights to bf16 on CPUs with AVX512-BF16
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False
"""
INSTEAD = """\
model.generation_config = settings  # else generate uses what the model's own has besides, such as a repetition penalty
"""
GENERATE = """\
output = model.generate(**inputs, generation_config=settings)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""
