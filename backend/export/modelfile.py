"""The Modelfile of an exported model for Ollama: the trained chat template in Ollama's language, and the stop tokens.

Ollama does not run the chat template of a GGUF file. It uses the template of the Modelfile, a Go template, or a similar
one of its own. So the parts of the trained template are found by rendering marks, and the Modelfile is written only if
these parts, put together as Ollama does, give what the trained template renders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SYSTEM, USER = ("system", "@system@"), ("user", "@user@")  # role, and a mark as content
ASSISTANT, AGAIN = ("assistant", "@assistant@"), ("user", "@again@")


@dataclass(frozen=True)
class Parts:
    """The text around the messages of a turn; `default` is the system prompt of conversations without one."""

    before_system: str
    after_system: str
    before_user: str
    after_user: str
    after_assistant: str
    default: str

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt as Ollama renders a template without .Messages: turn by turn, the last turn up to its response."""
        text, system = "", self.default
        for role, content in messages:
            if role == "system":
                system = content
            elif role == "user":
                if system:
                    text += f"{self.before_system}{system}{self.after_system}"
                text, system = f"{text}{self.before_user}{content}{self.after_user}", ""
            else:
                text += f"{content}{self.after_assistant}"
        return text


def write(file: str, tokenizer: Any, stops: Sequence[str], trained_system: str = "", adapter: str = "") -> str:
    """The text of the Modelfile; '' without a chat template, or if its prompts cannot be built from such parts.
    `trained_system`: the system prompt of the training examples, which conversations without one get; `adapter`: the
    file of a LoRA adapter."""
    parts = _find_parts(tokenizer, stops) if tokenizer.chat_template else None
    system_prompt = trained_system or (parts.default if parts else "")
    texts = [*vars(parts).values(), system_prompt] if parts else []
    if parts is None or any(mark in text for text in texts for mark in ('"""', "{{")):
        return ""
    system = f"{{{{ if .System }}}}{parts.before_system}{{{{ .System }}}}{parts.after_system}{{{{ end }}}}"
    turn = f"{parts.before_user}{{{{ .Prompt }}}}{parts.after_user}{{{{ .Response }}}}{parts.after_assistant}"
    lines = [f"FROM ./{file}", *([f"ADAPTER ./{adapter}"] if adapter else []), f'TEMPLATE """{system}{turn}"""']
    if system_prompt:
        lines.append(f'SYSTEM """{system_prompt}"""')
    return "\n".join([*lines, *(f'PARAMETER stop "{stop}"' for stop in stops)]) + "\n"


def _find_parts(tokenizer: Any, stops: Sequence[str]) -> Parts | None:
    """The parts of the trained template; None if its prompts have other parts too, or it refuses a conversation."""
    conversations = ([USER], [SYSTEM, USER], [USER, ASSISTANT, AGAIN], [SYSTEM, USER, ASSISTANT, AGAIN])
    try:
        alone, both, long, long_both = (_render(tokenizer, messages) for messages in conversations)
        before_system, rest = both.split(SYSTEM[1])
        inner, after_user = rest.split(USER[1])
        again = long.split(ASSISTANT[1])[1].split(AGAIN[1])[0]
        after_assistant = _until_stop(again, stops)
        before_user = again[len(after_assistant) :]
        after_system = inner.removesuffix(before_user)
        default = alone.split(USER[1])[0].removesuffix(before_user)
        default = default.removeprefix(before_system).removesuffix(after_system)
    except Exception:  # errors of the template, of any kind, and marks that it changes
        return None
    parts = Parts(before_system, after_system, before_user, after_user, after_assistant, default)
    rendered = [parts.render(messages) for messages in conversations]
    return parts if rendered == [alone, both, long, long_both] else None


def _render(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> str:
    """The prompt of the trained template, without the BOS token if the program that runs the file adds it."""
    conversation = [{"role": role, "content": content} for role, content in messages]
    text = str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(tokenizer.bos_token) if adds_bos else text


def _until_stop(text: str, stops: Sequence[str]) -> str:
    """The beginning of `text` through the first stop token, and the whitespace after it. Raises ValueError."""
    end = min(text.index(stop) + len(stop) for stop in stops if stop in text)
    return text[: len(text) - len(text[end:].lstrip())]
