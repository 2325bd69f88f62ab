"""What llama.cpp does with a GGUF file: it tokenizes, renders the chat template, predicts, generates and stops.

llama.cpp's own server answers, so the results are those that its users get. It runs in a process of its own, because an
unusable file may crash it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from backend.environments import ADAPTER_SCRIPT, CONVERTER, PACKAGES
from backend.environments.llama_cpp import QUANTIZER, LlamaCppServer, Settings
from backend.environments.server_process import ServerError
from backend.train.run_log import TrainError

CONTEXT = 2048  # tokens of a request, with those that are generated
TIMEOUT_SECONDS = 600.0  # per request; the longest generates a few dozen tokens on the CPU
FORCED = 1000.0  # added to a logit: this token is generated, whatever the model predicts
MOST_LIKELY = 1000  # tokens whose probabilities are requested: JSON of a whole vocabulary takes half a second


@dataclass(frozen=True)
class Generated:
    """A greedy output, and whether it ended with a stop token rather than at the limit."""

    text: str
    stopped: bool


class Runtime(Protocol):
    """The questions that a runtime answers about a GGUF file."""

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        """Token ids of a text, in which special tokens are recognized; `add_special`: with a BOS token if the file
        asks for one."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt of a conversation. Raises LlamaCppError if the template cannot render it."""

    def eos_token(self) -> str:
        """The text of the EOS token."""

    def stops_at(self, token: int) -> bool:
        """Whether a generation ends at this token."""

    def most_likely(self, ids: Sequence[int]) -> dict[int, float]:
        """Log-probabilities of the most likely next tokens, without those that are not finite."""

    def generate(self, ids: Sequence[int], limit: int) -> Generated:
        """The greedy output for a prompt, of at most `limit` tokens."""


class LlamaCppError(TrainError):
    """llama.cpp refuses a file or a request; the message is a sentence."""


class Server:
    """A Runtime: llama.cpp's server with the GGUF `file`, and with a LoRA `adapter` for it if there is one, from its
    start to `close`. `environment` is the folder of the environment gguf, `log` the file for the server's messages.
    Raises LlamaCppError."""

    def __init__(self, file: Path, environment: Path, log: Path, adapter: Path | None = None) -> None:
        self._key = secrets.token_hex(16)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._plain = 0  # set by most_likely: an ordinary token
        try:
            settings = Settings(file.resolve(), self._key, CONTEXT, adapter=adapter and adapter.resolve())
            self._process = LlamaCppServer(environment, settings, log)
        except ServerError as error:
            raise LlamaCppError(f"llama.cpp cannot load the GGUF file: {error}") from error

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        """See Runtime."""
        found = self._ask("tokenize", {"content": text, "add_special": add_special, "parse_special": True})
        return [int(token) for token in found["tokens"]]

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """See Runtime."""
        return str(self._ask("apply-template", {"messages": list(messages)})["prompt"])

    def eos_token(self) -> str:
        """See Runtime."""
        return str(self._ask("props", None)["eos_token"])

    def stops_at(self, token: int) -> bool:
        """See Runtime: the token is generated, and one more is requested."""
        request = {"prompt": self._some_prompt(), "n_predict": 2, "logit_bias": [[token, FORCED]]}
        return bool(self._ask("completion", {**GREEDY, **request})["stop_type"] == "eos")

    def most_likely(self, ids: Sequence[int]) -> dict[int, float]:
        """See Runtime. The server sends no probabilities if the generated token is only a part of a character, so an
        ordinary token is forced. This does not change the reported probabilities, which are those of the model."""
        request = {"prompt": list(ids), "n_predict": 1, "n_probs": MOST_LIKELY}
        forced = {"logit_bias": [[self._some_prompt()[-1], FORCED]]}
        found = self._ask("completion", {**GREEDY, **request, **forced})["completion_probabilities"][0]
        tokens = {int(token["id"]): token["logprob"] for token in found["top_logprobs"]}
        return {token: float(value) for token, value in tokens.items() if value is not None}  # null: not finite

    def generate(self, ids: Sequence[int], limit: int) -> Generated:
        """See Runtime."""
        found = self._ask("completion", {**GREEDY, "prompt": list(ids), "n_predict": limit})
        return Generated(str(found["content"]), found["stop_type"] == "eos")

    def _some_prompt(self) -> list[int]:
        self._plain = self._plain or self.tokenize("a", False)[-1]
        return [self._plain]

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._process.address}/{path}", data, headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise LlamaCppError(f"llama.cpp refuses the request {path}: {_message(error)}") from error
        except OSError as error:
            raise LlamaCppError(f"llama.cpp did not answer the request {path}: {self._process.last_line()}") from error


GREEDY = {"temperature": 0, "repeat_penalty": 1.0, "cache_prompt": True}


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return str(error)


def context_of(model: Any) -> int:
    """The context size of the server with this model, in tokens; llama.cpp does not exceed the context size of the
    model."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(CONTEXT, own) if isinstance(own, int) and own > 0 else CONTEXT


def variables(environment: Path) -> dict[str, str]:
    """The environment variables of the processes of converter and quantizer."""
    path = os.pathsep.join((str(environment / PACKAGES), str(environment / CONVERTER / "gguf-py")))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def convert_command(environment: Path, model: Path, file: Path, format: str, name: str) -> list[str]:
    """The command of llama.cpp's converter."""
    script = environment / CONVERTER / "convert_hf_to_gguf.py"
    options = ("--outfile", str(file), "--outtype", format, f"--model-name={name}")
    return [sys.executable, str(script), str(model), *options]


def convert_adapter_command(environment: Path, base: Path, adapter: Path, file: Path) -> list[str]:
    """The command of llama.cpp's converter of LoRA adapters; `base` has the config.json of the base model. The matrices
    stay in fp32, since small elements of B would be rounded to zero in fp16."""
    script = environment / CONVERTER / ADAPTER_SCRIPT
    return [sys.executable, str(script), str(adapter), "--base", str(base), "--outfile", str(file), "--outtype", "f32"]


def quantize_command(source: Path, file: Path, format: str) -> list[str]:
    """The command that writes a k-quant from a GGUF file with 16 bits."""
    return [sys.executable, "-P", str(QUANTIZER), str(source), str(file), format]
