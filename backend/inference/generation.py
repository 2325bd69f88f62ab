"""One output of a model, token by token: the probability of each token, and how the output ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from backend.inference.loading import Loaded
from backend.models.chat_files import Request
from backend.train import end_tokens
from backend.train.generation_eval import OwnSettings, without_router_loss
from backend.train.run_log import TrainError

BATCH_SECONDS = 0.1  # between two reports of new text
WINDOW = 12  # tokens before a token that its text may depend on, such as the rest of a character
PARTIAL = "\ufffd"  # the result of decoding an incomplete character
STOP_TOKEN, LIMIT, CONTEXT, STOPPED = "stop token", "limit", "context", "stopped"  # how an output ended
Report = Callable[[str], None]


@dataclass
class Output:
    """What was generated so far. `end`: how the output ended; `stop`: the text of the stop token; `limit`: the maximum
    number of tokens."""

    ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    seconds: float = 0.0
    seed: int | None = None
    limit: int = 0
    end: str = ""
    stop: str = ""


def generate(
    loaded: Loaded, ids: Sequence[int], request: Request, report: Report, should_stop: Callable[[], bool]
) -> Output:
    """The output after the prompt `ids`. `report` gets new text; `should_stop` is asked after each token. Raises
    TrainError."""
    room = _positions(loaded.model) - len(ids)
    if room < 1:
        raise TrainError(
            f"The prompt, including earlier turns, has {len(ids):,} tokens; the model's context length is "
            f"{len(ids) + room:,}. Shorten the prompt, or clear the conversation."
        )
    output = Output(limit=min(request.max_new_tokens, room))
    if request.temperature > 0:
        output.seed = secrets.randbelow(2**31) if request.seed is None else request.seed
        torch.manual_seed(output.seed)
    stops = stop_tokens(loaded)
    each = _EachToken(loaded.tokenizer, output, _reporting_text(loaded.tokenizer, output, report), should_stop)
    started = time.monotonic()
    with loaded.active() as model:
        prompt = torch.tensor([list(ids)], device=model.device)
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=_config(loaded, request, output.limit, stops),
            logits_processor=LogitsProcessorList([each.logits]),
            stopping_criteria=StoppingCriteriaList([each]),
            **without_router_loss(model),
        )
    output.seconds = time.monotonic() - started
    last = output.ids[-1] if output.ids else None
    if last in stops:
        output.end, output.stop = STOP_TOKEN, loaded.tokenizer.decode([last])
    elif len(output.ids) >= output.limit:
        output.end = LIMIT if output.limit == request.max_new_tokens else CONTEXT
    else:
        output.end = STOPPED
    return output


def text_ids(tokenizer: Any, text: str) -> tuple[list[int], bool]:
    """The token ids of a text that a model continues, and whether they lack an EOS token that the tokenizer adds to
    texts: as in training, that token ends a text."""
    ids, alone = (list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (True, False))
    adds_eos = ids[-1:] == [tokenizer.eos_token_id] != alone[-1:]
    return (ids[:-1] if adds_eos else ids), adds_eos


def stop_tokens(loaded: Loaded) -> set[int]:
    """The tokens at which an output ends: those of the generation config and, as when training generates for eval
    examples, the EOS token of the trained tokenizer."""
    has_own = getattr(loaded.generation, "eos_token_id", None) not in (None, [])
    if has_own and not loaded.stops_at_eos:
        own = loaded.generation.eos_token_id
        return {own} if isinstance(own, int) else set(own)
    return end_tokens.stop_tokens(loaded.generation, loaded.tokenizer)


def _positions(model: Any) -> int:
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(known) if known else 2**31


def _config(loaded: Loaded, request: Request, limit: int, stops: set[int]) -> OwnSettings:
    sampling: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        sampling = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
    return OwnSettings(
        max_new_tokens=limit,
        eos_token_id=sorted(stops) or None,
        pad_token_id=loaded.tokenizer.pad_token_id,
        use_cache=True,
        **sampling,
    )


class _Logits(LogitsProcessor):
    """Keeps the model's prediction for the next token, before temperature and top_p change it."""

    def __init__(self) -> None:
        self.scores: Any = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.scores = scores
        return scores

    def probability(self, token: int) -> float:
        """How probable the model found this token."""
        return float(torch.softmax(self.scores[0].float(), dim=-1)[token])


class _EachToken(StoppingCriteria):
    """Records each token with its probability, and ends the output if `should_stop` says so."""

    def __init__(
        self, tokenizer: Any, output: Output, report: Callable[[], None], should_stop: Callable[[], bool]
    ) -> None:
        self.tokenizer, self.output, self.report, self.should_stop = tokenizer, output, report, should_stop
        self.logits = _Logits()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        token = int(input_ids[0, -1])
        self.output.ids.append(token)
        self.output.probabilities.append(self.logits.probability(token))
        self.report()
        return torch.full((1,), self.should_stop(), dtype=torch.bool, device=input_ids.device)


def _reporting_text(tokenizer: Any, output: Output, report: Report) -> Callable[[], None]:
    """A function that reports new text, a little at a time: not each token, and no incomplete characters."""
    sent, reported = "", time.monotonic()

    def report_new() -> None:
        nonlocal sent, reported
        now = time.monotonic()
        if now - reported < BATCH_SECONDS and len(output.ids) > 1:
            return
        text = tokenizer.decode(output.ids, skip_special_tokens=True)
        if text.startswith(sent) and len(text) > len(sent) and not text.endswith(PARTIAL):
            report(text[len(sent) :])
            sent, reported = text, now

    return report_new


def text_of(tokenizer: Any, output: Output, special: bool = False) -> str:
    """The text of an output, without the token that ended it; with its `special` tokens on request."""
    ids = output.ids[:-1] if output.end == STOP_TOKEN else output.ids
    return str(tokenizer.decode(ids, skip_special_tokens=not special))


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. A character of several tokens belongs to the last of them."""
    found = []
    for number in range(len(ids)):
        first = max(0, number - WINDOW)
        before = tokenizer.decode(ids[first:number]).rstrip(PARTIAL)
        text = tokenizer.decode(ids[first : number + 1])
        found.append(
            text.rstrip(PARTIAL)[len(before) :] if text.startswith(before) else tokenizer.decode([ids[number]])
        )
    return found
