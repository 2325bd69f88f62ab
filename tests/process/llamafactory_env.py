"""An environment with LLaMA-Factory for tests of `make soak`: installed on first use, kept in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# llamafactory 0.9.5 pins old versions of packages that training on text does not need, so it is installed without
# dependencies; it imports torchaudio, which has no CPU build for this torch.
PINS = (
    "torch==2.13.0", "transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0", "datasets==4.0.0",
    "gradio==5.50.0", "deepspeed", "av<17", "tyro<0.9", "einops", "fire", "omegaconf", "sse-starlette", "tiktoken",
    "sentencepiece", "modelscope", "hf-transfer", "librosa", "matplotlib", "scipy",
)  # fmt: skip
SETUP = 'from setuptools import setup\nsetup(name="torchaudio", version="2.13.0", packages=["torchaudio"])\n'


def llamafactory_environment() -> Path:
    """The folder of the virtual environment."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "footplate-tests" / "llamafactory-0.9.5"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        audio = folder / "torchaudio-source"
        (audio / "torchaudio").mkdir(parents=True)
        (audio / "torchaudio/__init__.py").touch()
        (audio / "setup.py").write_text(SETUP)
        for packages in (PINS, (str(audio), "--no-deps", "llamafactory==0.9.5")):
            subprocess.run([str(folder / "bin/pip"), "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return folder
