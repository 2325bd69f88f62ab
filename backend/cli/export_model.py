"""The command export-model: the model of a run as a GGUF file, its adapter as GGUF LoRA, or a quantized checkpoint, and
whether llama.cpp or transformers runs the same model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from backend.cli.jobs import follow, model_step, report
from backend.cli.runs import find_run
from backend.models import gguf, quantized
from backend.models.gguf import MODELFILE, PRESET
from backend.runs.folder import Run


def start(arguments: argparse.Namespace) -> int:
    """Export and wait for the end; Ctrl-C stops it."""
    run, format = find_run(Path(arguments.runs), arguments.run), arguments.format
    step = model_step(run, arguments.step)
    if format in quantized.FORMATS:
        return _start_quantized(run, step, arguments)
    job = gguf.start(run, step, format)
    follow(job)
    shown = gguf.as_json(job)
    return report(job, shown, arguments.json, lambda: _print_result(shown["gguf"], shown["result"]["certificate"]))


def _start_quantized(run: Run, step: int | None, arguments: argparse.Namespace) -> int:
    job = quantized.start(run, step, arguments.format)
    follow(job)
    shown = quantized.as_json(job)
    return report(job, shown, arguments.json, lambda: _print_quantized(shown))


def _print_quantized(shown: dict[str, Any]) -> None:
    certificate = shown["result"]["certificate"]
    print(f"Quantized checkpoint, {shown['label']}: {shown['model']['folder']}")
    print(
        f"{certificate['status'].capitalize()}: the checkpoint was loaded by transformers in a new process and "
        "compared with the trained model."
    )
    _print_divergence(certificate["trained_to_checkpoint"], certificate)
    print(f"Stop tokens: {', '.join(certificate['stop_tokens'])}.")
    for limit in certificate["limits"]:
        print(f"Limitation: {limit}")


def _print_divergence(found: dict[str, Any], certificate: dict[str, Any]) -> None:
    change = certificate["trained_to_base"]
    print(f"KL divergence: mean {found['kl_mean']:.2g}, largest {found['kl_max']:.2g} nats per token.", end=" ")
    print(f"Limit for the mean: {certificate['max_kl_mean']:g}.", end="\n" if not change else " ")
    if change:
        print(f"For comparison, the base model without the adapter: {change['kl_mean']:.2g}.")
    print(f"Same most likely next token: {found['same_argmax']:.1%} of {found['positions']} positions.")


def _print_result(gguf_file: dict[str, Any], certificate: dict[str, Any]) -> None:
    if gguf_file.get("adapter"):
        print(f"GGUF LoRA adapter: {gguf_file['adapter']}")
        print(f"GGUF file of its base model: {gguf_file['file']}")
    else:
        print(f"GGUF file: {gguf_file['file']}")
    for name, text in ((MODELFILE, "Modelfile for Ollama"), (PRESET, "Preset for LM Studio")):
        if name in gguf_file["files"]:
            print(f"{text} (untested): {Path(gguf_file['file']).parent / name}")
    print(
        f"{certificate['status'].capitalize()}: the file was loaded in llama.cpp and compared with the trained model."
    )
    _print_divergence(certificate["trained_to_file"], certificate)
    stops = [output["llama_cpp"]["stopped"] for output in certificate["outputs"]]
    ended = f"{sum(stops)} of {len(stops)} outputs ended with a stop token in llama.cpp."
    print(f"Stop tokens: {', '.join(certificate['stop_tokens'])}. {ended}")
    if types := certificate.get("tensor_types"):
        counts = ", ".join(f"{type} {len(names)}" for type, names in types.items())
        print(f"Quantized weights by type: {counts}. {certificate['replaced']}".rstrip())
    for limit in certificate["limits"]:
        print(f"Limitation: {limit}")
