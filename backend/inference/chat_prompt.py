"""The prompt of a chat: the conversation so far, rendered with the chat template as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trl.chat_template_utils import parse_response

from backend.config import RunSpec
from backend.data.chat import TEMPLATE_KWARGS, with_system_prompt
from backend.models import chat_files, conversation, system_prompt
from backend.models.chat_files import Request, Turn
from backend.models.conversation import TOOL
from backend.train.run_log import TrainError
from backend.train.template_input import TEMPLATE_ERRORS
from backend.train.templates import ChatTokenizer, UnsupportedConversation, response_tokenizer

RESULT = "result-of-turn-{:06}"  # occurs in no conversation
CALL_ID = "call00001"  # some templates require nine letters and digits
Message = Mapping[str, Any]


def render(
    spec: RunSpec, template: ChatTokenizer, request: Request, side: str, before: Sequence[Turn]
) -> dict[str, Any]:
    """The `prompt` that the template makes of a request after the turns `before`, and the `messages`; `is_plain`:
    transformers renders the same prompt from the messages without Footplate. Raises TrainError,
    UnsupportedConversation."""
    tools = conversation.parse_tools(request.tools)
    template = template.of({"tools": tools})
    reads = template.input.variables
    if "tools" not in reads:
        refuse_tools(request, "The chat template of this model does not read tools")
    if unread := sorted(request.template_kwargs.keys() - reads):
        raise TrainError(
            f"Chat template kwargs: remove {', '.join(unread)}, which the chat template of this model does not read."
        )
    variables = {**({"tools": tools} if tools else {}), TEMPLATE_KWARGS: dict(request.template_kwargs)}
    problem: UnsupportedConversation | None = None
    for answer in (_as_written, partial(_with_calls, template), _without_special_tokens):
        found = messages(spec, request, side, before, answer)
        try:
            prompt = template.render_prompt(found, variables)
            _check_results(template, found, variables)
        except UnsupportedConversation as error:
            problem = problem or error
            continue
        return {"prompt": prompt, "messages": found, "is_plain": _is_plain(template, found, variables, prompt)}
    assert problem
    raise problem


def _check_results(template: ChatTokenizer, found: Sequence[Message], variables: Message) -> None:
    """Raise UnsupportedConversation if the template leaves out the results of tools, as Gemma 4's does unless the turn
    before has `tool_calls`. The text of a result may occur elsewhere in the prompt, so marks are rendered instead."""
    if not any(turn["role"] == TOOL for turn in found):
        return
    results = {n: RESULT.format(n) for n, turn in enumerate(found) if turn["role"] == TOOL}
    turns = [{**turn, "content": results.get(n, turn["content"])} for n, turn in enumerate(found)]
    prompt = template.render_prompt(turns, variables)
    if not all(text in prompt for text in results.values()):
        raise UnsupportedConversation(
            "has a tool result that the chat template leaves out, because no tool call is recognized in the previous "
            "output. Send the result as a user prompt"
        )


# -- how an earlier output is given to the template --------------------------------------------------------------------


def _as_written(output: Message) -> dict[str, Any]:
    return {"content": chat_files.written(output)}


def _with_calls(template: ChatTokenizer, output: Message) -> dict[str, Any]:
    """The output as a turn with the tool calls that TRL, or the tokenizer's own response template, recognizes in it."""
    tokenizer = response_tokenizer(template.tokenizer, str(template.tokenizer.chat_template))
    if tokenizer is None:
        return _as_written(output)
    text = f"{output.get('opened') or ''}{chat_files.written(output)}{output.get('stop') or ''}"
    parsed = parse_response(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], prefix=[])
    flat = (call if "function" in call else {"function": call} for call in parsed.get("tool_calls") or ())
    calls = [{"id": CALL_ID, "type": "function", **call} for call in flat]
    return {**parsed, **({"tool_calls": calls} if calls else {})}


def _without_special_tokens(output: Message) -> dict[str, Any]:
    """The output without special tokens, which gpt-oss's template refuses although its model writes them."""
    return {"content": str(output.get("text") or "")}


def messages(
    spec: RunSpec,
    request: Request,
    side: str,
    before: Sequence[Turn],
    answer: Callable[[Message], dict[str, Any]] = _as_written,
) -> list[dict[str, Any]]:
    """The conversation as this model has seen it: the turns that it has answered. Raises TrainError."""
    found: list[dict[str, Any]] = []
    for turn in before:
        output = turn.outputs.get(side, {})
        if chat_files.written(output).strip():
            given = answer(output)
            content = str(given.get("content") or "").strip()
            found += [_prompt(turn.request, found), {"role": "assistant", **given, "content": content}]
    if request.role == TOOL and not found:
        raise TrainError("A tool result has to follow an output of this model. Send a prompt first.")
    found.append(_prompt(request, found))
    system = system_prompt.of_training(spec) if request.system is None else request.system
    return list(with_system_prompt(found, system))


def _prompt(request: Request, before: Sequence[Message]) -> dict[str, Any]:
    """The turn of a prompt; a tool result belongs to the call in the turn before."""
    turn = {"role": request.role, "content": request.prompt}
    calls = before[-1].get("tool_calls") if before and request.role == TOOL else None
    return {**turn, "name": calls[0]["function"]["name"], "tool_call_id": calls[0]["id"]} if calls else turn


def refuse_tools(request: Request, reason: str) -> None:
    """Raise TrainError if the model would not see the request's tools, or would not see that its prompt is a tool
    result."""
    if request.tools.strip():
        raise TrainError(
            f"Tools: {reason[0].lower()}{reason[1:]}, so it would ignore them. Clear the field Tools, or run "
            "the command without --tools."
        )
    if request.role == TOOL:
        raise TrainError(f"{reason}, so a tool result cannot be sent. Send it as a user prompt.")


def _is_plain(
    template: ChatTokenizer, found: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], prompt: str
) -> bool:
    more = {"tools": variables.get("tools"), **variables[TEMPLATE_KWARGS]}
    with suppress(*TEMPLATE_ERRORS):
        text = template.tokenizer.apply_chat_template(list(found), tokenize=False, add_generation_prompt=True, **more)
        return bool(text == prompt)
    return False
