"""Whether llama.cpp runs the trained model: tokens, chat template, stop tokens and predictions on the same texts.

The trained model computes in fp32 with transformers. A file that differs is not kept. A difference that affects only
rare texts, or that needs a setting in the program that uses the file, is a limitation.
"""

from __future__ import annotations

import math
import statistics
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from backend.export.comparison import TEXTS, Difference, compare, held_out, log_probabilities, probe_batches
from backend.export.llama_cpp import Generated, LlamaCppError, Runtime, context_of
from backend.models.gguf import ADAPTER, FORMATS
from backend.train import end_tokens
from backend.train.generation_eval import OwnSettings

NUMERALS = "x ½ ① ٣ Ⅳ y"
LONG = "\n".join([text.strip() for text in TEXTS] * 6)
LONG_TOKENS, LAST_TOKENS = 400, 128  # tokens of the longer text; compared tokens per text
SYSTEM, USER, ASSISTANT = ({"role": role, "content": text} for role, text in (
    ("system", "You are a helpful assistant. Answer briefly."),
    ("user", "What is the capital of France?"),
    ("assistant", "Paris."),
))  # fmt: skip
AGAIN = {"role": "user", "content": "And of Italy? 🙂 "}
CONVERSATIONS = ([USER], [SYSTEM, USER], [USER, ASSISTANT, AGAIN], [SYSTEM, USER, ASSISTANT, AGAIN])
MAX_NEW_TOKENS = 64  # length limit of greedy outputs
STRIDE = 2  # every second position is compared: llama.cpp computes them one by one
APART = 4.0  # the base model has to be this many times as far from the trained model as the file is,
STANDARD_ERRORS = 4.0  # or the file has to be nearer to the trained than to the base model by this many
MIN_SAME = 0.75  # positions with the same most likely token: q8_0 of SmolLM2 has 93%
OTHER_TOKENIZER = (
    "llama.cpp reimplements the tokenizers of published models, and this one is different: run this model with "
    "transformers or vLLM."
)
SPACE = "\u2581"  # how SentencePiece writes a space
ADDED_SPACE = (
    "llama.cpp adds a space to text that follows a special token. With add_prefix_space false in the tokenizer before "
    "training, it does not."
)
CONTEXT_SHOWN = 40  # characters before a difference


@dataclass
class Trained:
    """What the trained model does. `base`: the log-probabilities of the base model, None for full weights."""

    tokenizer: Any
    stops: list[int]
    batches: list[torch.Tensor]  # (1, tokens) each
    expected: list[torch.Tensor]  # (tokens, vocabulary) each
    base: list[torch.Tensor] | None
    texts: list[str]
    odd_texts: list[str]  # texts whose tokens may differ; reported as a limitation
    prompts: list[list[int]]
    outputs: list[Generated]


@dataclass
class Findings:
    """`differences` are reasons not to use the file, in the order of the checks; `limits` are limitations. All are
    sentences."""

    differences: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end the completions of the trained model."""
    return sorted(end_tokens.stop_tokens(getattr(model, "generation_config", None), tokenizer))


def probes(run: Path, model: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Token ids of the texts whose predictions are compared, of shape (1, tokens). llama.cpp generates one token for
    each prediction."""
    long = tokenizer(LONG, add_special_tokens=False)["input_ids"][:LONG_TOKENS]
    return [ids[:, : context_of(model) - 1] for ids in (*probe_batches(run, tokenizer), torch.tensor([long]))]


def observe(
    run: Path, model: Any, tokenizer: Any, stops: list[int], batches: list[torch.Tensor],
    of_base: list[torch.Tensor] | None,
) -> Trained:  # fmt: skip
    """What the trained `model` does with the texts of the comparison, some of which come from the run. `batches` come
    from `probes`; `of_base` are the log-probabilities of the base model for them."""
    odd = [text for text in TEXTS if text.startswith(" ")]
    texts = [*(text for text in TEXTS if text not in odd), NUMERALS, LONG, *held_out(run)]
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special][:32]
    odd.append("a" + " b".join(special) + "c")
    prompts = _prompts(run, tokenizer, context_of(model) - MAX_NEW_TOKENS)
    outputs = [_generate(model, tokenizer, ids, stops) for ids in prompts]
    expected = log_probabilities(model, batches, "trained model")
    return Trained(tokenizer, stops, batches, expected, of_base, texts, odd, prompts, outputs)


def _prompts(run: Path, tokenizer: Any, limit: int) -> list[list[int]]:
    """The prompts of the greedy outputs: two of the run with at most `limit` tokens, else a fixed one."""
    prompts = [ids for text in held_out(run, False) if len(ids := _ids(tokenizer, text)) <= limit][:2]
    if not prompts and tokenizer.chat_template:
        ids = _ids(tokenizer, _rendered(tokenizer, [USER]) or str(USER["content"]))
        prompts = [ids] if len(ids) <= limit else []  # a template may add a long system prompt
    return prompts or [tokenizer(TEXTS[0])["input_ids"]]


@torch.no_grad()  # type: ignore[untyped-decorator]
def _generate(model: Any, tokenizer: Any, ids: list[int], stops: list[int]) -> Generated:
    prompt = torch.tensor([ids])
    config = OwnSettings(  # llama.cpp generates without a repetition penalty
        max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=stops or None, pad_token_id=tokenizer.pad_token_id
    )
    made = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    new = made[0, len(ids) :].tolist()
    return Generated(tokenizer.decode(new, skip_special_tokens=True), bool(new) and new[-1] in stops)


def certify(
    trained: Trained, runtime: Runtime, format: str, report: Callable[[float], None], replaced: str = ""
) -> dict[str, Any]:
    """Compare, and return the certificate. `report` gets the completed fraction; `replaced` is a sentence about weights
    that have another type than usual."""
    findings = Findings()
    _check_tokens(trained, runtime, findings)
    _check_template(trained, runtime, findings)
    also_stops = _check_stops(trained, runtime, findings)
    predictions = _check_predictions(trained, runtime, format, findings, report, replaced)
    outputs = _check_outputs(trained, runtime, findings)
    status = "verified with limitations" if findings.limits else "verified"
    return {
        "status": "differs" if findings.differences else status,
        "differences": findings.differences,
        "limits": findings.limits,
        "format": format,
        "replaced": replaced,
        "max_kl_mean": FORMATS[format].max_kl,
        "tokenized_texts": len(trained.texts) + len(trained.odd_texts),
        "stop_tokens": trained.tokenizer.convert_ids_to_tokens(trained.stops),
        "also_stops_at": also_stops,
        **predictions,
        "outputs": outputs,
    }


# -- tokens -----------------------------------------------------------------------------------------------------------


def _check_tokens(trained: Trained, runtime: Runtime, findings: Findings) -> None:
    """Compare the tokens of prompts and of ordinary texts, since programs send both. In many SentencePiece models,
    leading spaces and special tokens within a text have different tokens in llama.cpp; in BPE models, numerals have.
    Both are limitations."""
    tokenizer, rare = trained.tokenizer, ""
    for text in trained.texts:
        if not (difference := _token_difference(tokenizer, runtime, text)):
            continue
        if _without(text) == text or _token_difference(tokenizer, runtime, _without(text)):
            findings.differences.append(f"{difference} {OTHER_TOKENIZER}")
            return
        rare = rare or text
    for text in trained.odd_texts:
        if difference := _token_difference(tokenizer, runtime, text):
            what = "Text with leading spaces" if text.startswith(" ") else "Special tokens within a text"
            findings.limits.append(f"{what}: {difference}")
    if rare:
        alone = {character: _without(rare, character) for character in rare if character != _without(character)}
        odd = [character for character, text in alone.items() if _token_difference(tokenizer, runtime, text)]
        findings.limits.append(
            f"llama.cpp tokenizes non-ASCII numerals{_listed(odd)} differently than in training. Without these "
            "numerals, the tested texts have the same tokens."
        )


def _token_difference(tokenizer: Any, runtime: Runtime, text: str) -> str:
    """A sentence about the first token that differs, with or without the tokens that are added to texts; else ''."""
    for add_special in (False, True):
        there = runtime.tokenize(text, add_special)
        here = tokenizer(text, add_special_tokens=add_special)["input_ids"]
        if add_special and here[-1:] == [tokenizer.eos_token_id] and there[-1:] != here[-1:]:
            here = here[:-1]  # the tokenizer adds an EOS token for training; llama.cpp continues texts
        if there != here:
            at = _first_difference(here, there)
            return (
                f"llama.cpp tokenizes the text {_short(text)!r} differently: token {at + 1} is "
                f"{_token(tokenizer, here, at)} in training and {_token(tokenizer, there, at)} in llama.cpp."
                + (f" {ADDED_SPACE}" if _piece(tokenizer, there, at) == SPACE + _piece(tokenizer, here, at) else "")
            )
    return ""


def _first_difference(here: Sequence[Any], there: Sequence[Any]) -> int:
    pairs = enumerate(zip(here, there, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(here), len(there)))


def _without(text: str, kept: str = "") -> str:
    """The text with 0 for numerals that are not ASCII, except `kept`."""
    return "".join("0" if _is_rare_numeral(c) and c != kept else c for c in text)


def _is_rare_numeral(character: str) -> bool:
    return not character.isascii() and unicodedata.category(character) in ("Nd", "Nl", "No")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _token(tokenizer: Any, ids: Sequence[int], at: int) -> str:
    if at >= len(ids):
        return "missing"
    piece = _piece(tokenizer, ids, at)
    text = tokenizer.decode([ids[at]]) or piece  # decoding may leave it out, or the space before it
    if piece.startswith(SPACE) and not text.startswith((" ", SPACE)):
        text = f" {text}"
    return f"{text!r} ({ids[at]})"


def _piece(tokenizer: Any, ids: Sequence[int], at: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(ids[at])) if at < len(ids) else ""


def _listed(characters: Sequence[str]) -> str:
    return f" such as {' '.join(characters)}" if characters else ""


def _short(text: str) -> str:
    return text if len(text) <= CONTEXT_SHOWN else text[:CONTEXT_SHOWN] + "…"


# -- chat template ----------------------------------------------------------------------------------------------------


def _rendered(tokenizer: Any, conversation: Sequence[dict[str, str]]) -> str | None:
    """The prompt of a conversation; None if the trained template does not render it, such as one without system
    prompts."""
    try:
        return str(tokenizer.apply_chat_template(list(conversation), tokenize=False, add_generation_prompt=True))
    except Exception:
        return None


def _check_template(trained: Trained, runtime: Runtime, findings: Findings) -> None:
    tokenizer = trained.tokenizer
    if not tokenizer.chat_template:
        findings.limits.append(
            "The model has no chat template, so llama.cpp uses ChatML for chats, which the model was not trained with: "
            "use the file to complete texts, not to chat."
        )
        return
    for conversation in CONVERSATIONS:
        here = _rendered(tokenizer, conversation)
        if here is None:
            continue
        try:
            there = runtime.render(conversation)
        except LlamaCppError as error:
            findings.differences.append(f"llama.cpp cannot render the chat template: {error}")
            return
        bos = tokenizer.bos_token or ""
        if here.removeprefix(bos) != there.removeprefix(bos):  # llama.cpp adds the BOS token itself
            findings.differences.append(_template_difference(here, there))
            return
        ours, theirs = _ids(tokenizer, here), runtime.tokenize(there, True)
        if ours != theirs:
            at = _first_difference(ours, theirs)
            findings.differences.append(
                f"llama.cpp tokenizes the conversation that begins with {_short(here)!r} differently: token {at + 1} "
                f"is {_token(tokenizer, ours, at)} in training and {_token(tokenizer, theirs, at)} in llama.cpp "
                f"({len(ours)} and {len(theirs)} tokens in total)."
            )
            return


def _template_difference(here: str, there: str) -> str:
    at = _first_difference(here, there)
    chatml = there.startswith("<|im_start|>") and not here.startswith("<|im_start|>")
    why = " llama.cpp uses ChatML, its template for files without one." if chatml else ""
    return (
        f"The chat template renders a different prompt in llama.cpp. After {here[max(0, at - CONTEXT_SHOWN) : at]!r}, "
        f"training has {_short(here[at:])!r} and llama.cpp has {_short(there[at:])!r}.{why}"
    )


# -- stop tokens ------------------------------------------------------------------------------------------------------


def _check_stops(trained: Trained, runtime: Runtime, findings: Findings) -> list[str]:
    """Returns the special tokens at which only llama.cpp stops."""
    tokenizer = trained.tokenizer
    text = tokenizer.convert_ids_to_tokens
    for token in trained.stops:
        if not runtime.stops_at(token):
            findings.differences.append(
                f"llama.cpp does not stop at {text(token)} ({token}), which ends the completions of the trained model."
            )
    eos = runtime.eos_token()
    if others := [text(token) for token in trained.stops if text(token) != eos and runtime.stops_at(token)]:
        findings.limits.append(
            f"The EOS token of the file is {eos}, but the model also ends completions with {', '.join(others)}. "
            "llama.cpp stops there too; in programs that do not, set stop strings."
        )
    special = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special][:32]
    return [text(token) for token in special if token not in trained.stops and runtime.stops_at(token)]


# -- predictions ------------------------------------------------------------------------------------------------------


def _check_predictions(
    trained: Trained, runtime: Runtime, format: str, findings: Findings, report: Callable[[float], None], replaced: str
) -> dict[str, Any]:
    """KL divergence from the trained model, at every second position."""
    places = [(n, at) for n, ids in enumerate(trained.batches) for at in _compared(ids.shape[1])]
    divergences, of_base, same, worst = [], [], [], (0.0, 0, 0, 0)
    for done, (n, at) in enumerate(places):
        expected = trained.expected[n][at]
        found = runtime.most_likely(trained.batches[n][0, : at + 1].tolist())
        if not found:
            fix = _export_as("bf16", format)
            raise LlamaCppError(
                f"llama.cpp computes NaN or infinite values with this file, so the file was deleted.{fix}"
            )
        divergences.append(divergence(expected, found))
        if trained.base is not None:
            of_base.append(divergence(trained.base[n][at], found))
        top = max(found, key=lambda token: found[token])
        same.append(int(expected.argmax()) == top)
        worst = max(worst, (divergences[-1], n, at, top))
        report((done + 1) / len(places))
    mean = _mean(divergences)
    difference = Difference(len(places), mean, max(divergences), sum(same) / len(same))
    change = _change(trained)
    limit = FORMATS[format].max_kl
    if mean > limit:
        larger = FORMATS[format].larger
        remedy = [f"Export as {larger}.", replaced] if larger else []
        findings.differences.append(" ".join(filter(None, [_sentence(mean, limit), *remedy, _worst(trained, *worst)])))
    if change and mean * APART > change.kl_mean and not are_smaller(divergences, of_base):
        other = _export_as("f16", format)
        findings.differences.append(
            "The comparison cannot rule out that the adapter is missing from the file: the mean KL divergence from the "
            f"trained model is {mean:.2g} nats per token, more than a quarter of that between trained model and base "
            f"model ({change.kl_mean:.2g}), and not clearly below the file's divergence from the base "
            f"model ({_mean(of_base):.2g}). "
            f"Training may also have changed the model less than rounding to {format} does.{other}"
        )
    if difference.same_argmax < MIN_SAME:
        findings.differences.append(
            f"The most likely next token is the same at only {difference.same_argmax:.0%} of {len(places)} positions; "
            f"at least {MIN_SAME:.0%} are required."
        )
    return {
        "trained_to_file": difference.as_json(),
        "trained_to_base": change.as_json() if change else None,
        "base_to_file_kl_mean": _mean(of_base) if of_base else None,
    }


def _export_as(other: str, format: str) -> str:
    """The advice to export as `name`, to append to a sentence; '' if the export has that format."""
    name = f"{ADAPTER}{other}" if FORMATS[format].base else other
    return "" if format == name else f" Export as {name}."


def are_smaller(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether `values` are on average smaller than the others at the same positions, beyond chance. Rounding makes a
    file differ from both models by the same amount, so this comparison also detects a small adapter in a coarse
    format."""
    gaps = [other - value for value, other in zip(values, others, strict=True)]
    return _mean(gaps) > STANDARD_ERRORS * statistics.stdev(gaps) / math.sqrt(len(gaps))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _change(trained: Trained) -> Difference | None:
    """How far the base model is from the trained one at the same positions; None for full weights."""
    if trained.base is None:
        return None
    sides = ([values[list(_compared(len(values)))] for values in side] for side in (trained.expected, trained.base))
    return compare(*sides)


def _compared(tokens: int) -> range:
    """The positions that are compared in a text."""
    return range(max(1, tokens - LAST_TOKENS), tokens, STRIDE)


def divergence(expected: torch.Tensor, found: dict[int, float]) -> float:
    """KL divergence of `found`, log-probabilities of the most likely tokens, from `expected`, log-probabilities of
    shape (vocabulary,). All other tokens count as one, so the result is a lower bound, and a close one."""
    ids = torch.tensor([token for token in found if token < len(expected)])
    ours = expected[ids].double()
    theirs = torch.tensor([found[int(token)] for token in ids], dtype=torch.float64)
    rest = [(1 - values.exp().sum()).clamp(min=1e-9) for values in (ours, theirs)]
    total = (ours.exp() * (ours - theirs)).sum() + rest[0] * (rest[0] / rest[1]).log()
    return float(total.clamp(min=0))


def _sentence(mean: float, limit: float) -> str:
    return (
        f"llama.cpp predicts differently from the trained model: the mean KL divergence is {mean:.2g} nats per token, "
        f"and at most {limit:g} is accepted."
    )


def _worst(trained: Trained, kl: float, n: int, at: int, top: int) -> str:
    tokenizer, ids = trained.tokenizer, trained.batches[n][0, : at + 1].tolist()
    ours = int(trained.expected[n][at].argmax())
    return (
        f"It is largest ({kl:.2g}) after {tokenizer.decode(ids)[-CONTEXT_SHOWN:]!r}: the trained model continues with "
        f"{tokenizer.decode([ours])!r}, llama.cpp with {tokenizer.decode([top])!r}."
    )


# -- outputs ----------------------------------------------------------------------------------------------------------


def _check_outputs(trained: Trained, runtime: Runtime, findings: Findings) -> list[dict[str, Any]]:
    """Greedy outputs of both, without a limit on their difference: one rounded probability changes all that follows."""
    found = []
    for ids, here in zip(trained.prompts, trained.outputs, strict=True):
        there = runtime.generate(ids, MAX_NEW_TOKENS)
        found.append({"prompt": trained.tokenizer.decode(ids), "trained": asdict(here), "llama_cpp": asdict(there)})
        if here.stopped and not there.stopped:
            findings.limits.append(
                "For one prompt the trained model ends its output, and llama.cpp does not within "
                f"{MAX_NEW_TOKENS} tokens."
            )
    return found
