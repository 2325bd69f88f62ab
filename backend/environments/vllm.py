"""vLLM's server from the environment vllm: its arguments, and its process.

The names of the arguments are those of vLLM 0.33; tests/data/vllm_arguments.json has all of them. When the environment
is created, vllm_probe.py compares the names with the installed parser.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from backend.environments.server_process import END_SECONDS, ServerError, ServerProcess
from backend.runs import processes

ACCESS = Path(__file__).parent / "vllm_access"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm 0.33 config/lora.py, MaxLoRARanks
# Architectures of vllm 0.33 model_executor/models/registry.py for text whose class does not support LoRA. Architectures
# that are not in this registry run with vLLM's Transformers backend, which supports LoRA.
WITHOUT_LORA = (
    "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BloomForCausalLM", "Cohere2MoeForCausalLM",
    "DbrxForCausalLM", "DomynEdgeForCausalLM", "DoryForCausalLM", "FalconForCausalLM", "FalconMambaForCausalLM",
    "GPT2LMHeadModel", "GPTJForCausalLM", "Gemma3nForCausalLM", "HCXVisionV2ForCausalLM", "HrmTextForCausalLM",
    "IQuestLoopCoderForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM", "OrionForCausalLM", "StableLmForCausalLM", "Step1ForCausalLM", "Step3TextForCausalLM",
    "Step3p5ForCausalLM", "Zamba2ForCausalLM",
)  # fmt: skip
BASE_SUFFIX = " (base model)"  # suffix of the name under which clients reach an adapter's base model
POLL_SECONDS, ANSWER_SECONDS = 0.1, 5.0
LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
# A line of vLLM's log with an exception; the first parts are the process, and level, time and source file.
ERROR = re.compile(
    r"^(?:\([^)]*\) *)?(?:ERROR \S+ \S+ \[[^]]*\] )?((?:[\w.]*(?:Error|Exception)|vllm serve: error): .+)$",
    re.MULTILINE,
)
FOLLOWS = "Engine core initialization failed"  # follows an error of another process, which is earlier in the log


@dataclass(frozen=True)
class Settings:
    """`model`: a folder with full weights, or a model on the Hub with a commit as `revision`. With `adapter`, a folder
    with a LoRA adapter of this `rank`, `model` is the base model. `key`: what every request has to send as its Bearer
    token; `name`: the model's name for clients. `tokenizer` and `generation_config` are folders, '' for those of the
    model. `context`: tokens of a request with its output, 0 for as many as the model and the memory allow; `parallel`:
    requests at the same time, 0 for vLLM's default. `template_kwargs`: of the chat template."""

    model: str
    key: str = field(repr=False)
    name: str
    port: int
    adapter: str = ""
    rank: int = 0
    revision: str = ""
    tokenizer: str = ""
    generation_config: str = ""
    dtype: str = "auto"
    context: int = 0
    parallel: int = 0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def lora_rank(rank: int) -> int | None:
    """The value of --max-lora-rank for an adapter of this rank; None if vLLM supports no such rank."""
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), None)


def arguments(settings: Settings) -> list[str]:
    """The arguments of the program vllm. The API token is not among them: other users can read arguments."""
    values = {
        "--host": "127.0.0.1",
        "--port": settings.port,
        "--served-model-name": settings.name + (BASE_SUFFIX if settings.adapter else ""),
        "--dtype": settings.dtype,
        "--max-model-len": settings.context or "auto",
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--middleware": "footplate_access.RequireToken",
        "--revision": settings.revision,
        "--tokenizer": settings.tokenizer,
        "--generation-config": settings.generation_config,
        "--max-num-seqs": settings.parallel,
        "--default-chat-template-kwargs": json.dumps(settings.template_kwargs) if settings.template_kwargs else "",
    }
    switches = ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    switches += ["--trust-remote-code"] if settings.trust_remote_code else []
    if settings.adapter:
        switches.append("--enable-lora")
        values["--lora-modules"] = json.dumps({"name": settings.name, "path": settings.adapter})
        values["--max-lora-rank"] = lora_rank(settings.rank) or settings.rank
    return [
        "serve",
        settings.model,
        *switches,
        *(f"{name}={value}" for name, value in values.items() if value),  # a name may begin with a dash
    ]


def names() -> list[str]:
    """The names of all arguments that Footplate may pass."""
    every = Settings(
        "m", "", "n", 1, "a", 8, "r", "t", "g", "auto", 1, 1, trust_remote_code=True, template_kwargs={"a": 1}
    )
    return [word.partition("=")[0] for word in arguments(every) if word.startswith("--")]


class VllmServer(ServerProcess):
    """The server from its start to `close`; it also ends when the process that has started it ends. `environment` is
    the folder of the environment vllm, `log` the file for the server's messages. The constructor returns when the
    server answers requests, which takes minutes for large models, or is no longer `wanted`. Raises ServerError."""

    def __init__(self, environment: Path, settings: Settings, log: Path, wanted: Callable[[], bool]) -> None:
        self._log, self._port, self.address = log, settings.port, f"http://127.0.0.1:{settings.port}"
        own = {"VLLM_API_KEY": settings.key, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": str(ACCESS)}
        path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # ninja, for kernels
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(environment / "bin/vllm"), *arguments(settings)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # so that `close` can end the server's whole process group
                env={**os.environ, **own, "PATH": path},
                preexec_fn=partial(processes.end_with_parent, signal.SIGTERM),
            )
        try:
            self._wait(wanted)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self, wanted: Callable[[], bool]) -> None:
        while wanted():
            if how := self.ending():
                raise ServerError(self._error() or f"its process {how}. {self.last_line()}")
            if self._answers():
                return
            time.sleep(POLL_SECONDS)

    def _answers(self) -> bool:
        if not listens(self._port):
            return False
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), opener.open(f"{self.address}/health", timeout=ANSWER_SECONDS) as response:
            return bool(response.status == 200)
        return False

    def _error(self) -> str:
        """The last exception in the log that was not caused by an earlier one."""
        found = [error for error in ERROR.findall(self._text()) if FOLLOWS not in error]
        return " ".join(found[-1].split()) if found else ""


def listens(port: int) -> bool:
    """Linux: whether programs of this user, and no others, listen on a port. Another user could read the port in vLLM's
    arguments, listen on it first, and receive the API token."""
    users = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):  # a machine without IPv6
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                address, _, state, _, _, _, user = line.split()[1:8]
                if state == LISTEN and int(address.rpartition(":")[2], 16) == port:
                    users.add(int(user))
    return users == {os.getuid()}
