"""Exporting the trained model as a GGUF file, with a certificate that says whether llama.cpp runs the same model.

llama.cpp's converter writes the file; a k-quant is then made from a file with 16 bits per element. The converter reads
full weights: of a run, of a checkpoint, or of a merge. The file is compared with the trained model itself: for an
adapter, with base model and adapter, not with the merged model.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from backend.environments import ENVIRONMENTS
from backend.environments.server_process import describe_end
from backend.export import gguf_certificate, llama_cpp, lm_studio, loading, modelfile, tensor_types
from backend.export.comparison import provenance, write_certificate
from backend.export.exporter import Export
from backend.export.gguf_certificate import Trained
from backend.export.tensor_types import QuantizedWeight
from backend.models import system_prompt, trained
from backend.models.exports import SOURCE, TEMPORARY, UNCHECKED
from backend.models.gguf import (
    ADAPTER,
    DEFAULT,
    ENVIRONMENT,
    FOLDER,
    FORMATS,
    MODELFILE,
    PRESET,
    SYSTEM_PROMPT,
    file_stem,
)
from backend.models.spec import read_spec_outside_training
from backend.runs import CERTIFICATE, RESULT, SPEC, deletion, files, jobs
from backend.train import base_weights, model
from backend.train.run_log import TrainError

PROGRESS = re.compile(r"Writing: +(\d+)%")  # the converter's progress, printed by tqdm
KNOWN_ERRORS = {  # pattern -> what follows "cannot convert this model: "
    r"BPE pre-tokenizer was not recognized": "it knows the BPE tokenizers of published models only, and this model's "
    "tokenizer is not one of them. Use the model with transformers or vLLM, or train a model that has the tokenizer of "
    "a published model.",
    r"(File not found:|Missing) .*tokenizer\.model": "this kind of model needs tokenizer.model, the SentencePiece file "
    "of its tokenizer, and neither the model's folder nor that of its base model has one. Copy it from the original "
    "model to the folder of the base model, then export again.",
}
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
ADDED = "added_tokens_decoder"  # a key of tokenizer_config.json
OF_WEIGHTS = {
    "quantization_config",
    "auto_map",
    "architectures",
    "torch_dtype",
    "dtype",
}  # keys of the base model alone
LOG_FILE = "llama.cpp.txt"
SIXTEEN_BITS = "auto"  # the converter's choice: bf16 for weights in bf16, otherwise f16
CONVERTED, COMPARED = 0.3, 0.6  # completed fractions of the work
QUANTIZING = (0.2, CONVERTED)


class GgufExport(Export):
    """One export as a GGUF file."""

    def run_all(self) -> dict[str, Any]:
        """Convert, compare, keep. Returns the result; raises TrainError and Stopped."""
        request = jobs.required_request(self.folder, jobs.GGUF)
        format, environment = str(request["format"]), Path(request["environment"])
        found = self._model(request["step"])
        if found.base:
            loading.require_repeatable(self.run, found.folder)
        source = self._weights(found, str(request["merge"]))
        self._check_disk(source, format)
        (self.folder / UNCHECKED).mkdir(exist_ok=True)
        file = self.folder / UNCHECKED / self._file_name(format)
        try:
            quantized = self._write(environment, source, file, format)
            observed, base_check = self._observe(found)
            self._phase("comparing", "Comparing the file in llama.cpp with the trained model.", COMPARED)
            replaced = tensor_types.describe_replaced(quantized, FORMATS[format].base or format)
            certificate = self._certify(observed, environment, file, format, replaced)
            certificate["tensor_types"] = tensor_types.group(quantized)
            about = {"run": self.run.id, "step": found.step, "merge": request["merge"], "base_weights": base_check}
            about |= provenance(read_spec_outside_training(self.run), observed.batches)
            about["versions"] |= ENVIRONMENTS[ENVIRONMENT].versions(environment)
            certificate = {**about, **certificate}
            self._keep(certificate, observed.tokenizer, file)
        finally:
            deletion.delete_names(self.folder, TEMPORARY)
        return {"model": f"{FOLDER}/{file.name}", "certificate": certificate}

    @cached_property
    def _stem(self) -> str:
        return file_stem(self.run)  # once: the run may be renamed meanwhile

    def _file_name(self, format: str) -> str:
        return f"{self._stem}-{format}.gguf"

    def _check_disk(self, source: Path, format: str) -> None:
        """Raise TrainError if there is no room for the file."""
        kind = FORMATS[format]
        need = loading.elements(source) * (kind.bytes + 2 * bool(kind.larger)) * 1.05  # 5% more for the vocabulary
        needs = "GGUF file and the temporary file with 16 bits per element need" if kind.larger else "GGUF file needs"
        smaller = f"{ADAPTER}{DEFAULT}" if kind.base else DEFAULT
        other = "" if format == smaller else f", or export as {smaller}, which needs less"
        loading.require_room(self.folder, needs, need, other)

    def _write(self, environment: Path, source: Path, file: Path, format: str) -> list[QuantizedWeight]:
        """Convert the model, and quantize it for a k-quant; the quantized weights are returned. Raises TrainError,
        Stopped."""
        if not FORMATS[format].larger:
            self._convert(environment, source, file, format)
            return []
        whole = file.with_name("whole.gguf")
        self._convert(environment, source, whole, SIXTEEN_BITS)
        command = llama_cpp.quantize_command(whole, file, format)
        text = f"Quantizing to {format}."
        lines = self._run(command, environment, file, text, QUANTIZING, "The weights cannot be quantized: ")
        whole.unlink()
        result = next(line for line in reversed(lines) if line.startswith("[["))  # libraries may log when they end
        return [QuantizedWeight(*weight) for weight in json.loads(result)]

    def _convert(self, environment: Path, source: Path, file: Path, format: str) -> None:
        """Run llama.cpp's converter. Raises TrainError, Stopped."""
        linked = self._linked(source)
        self._complete_tokenizer_config(linked)
        command = llama_cpp.convert_command(environment, linked, file, format, self.run.name)
        text = f"Converting to GGUF, {'16 bits per element' if format == SIXTEEN_BITS else format}."
        end = QUANTIZING[0] if format == SIXTEEN_BITS else CONVERTED
        self._run(command, environment, file, text, (0.05, end), "llama.cpp's converter cannot convert this model: ")

    def _run(
        self, command: list[str], environment: Path, file: Path, text: str, fractions: tuple[float, float], failed: str
    ) -> list[str]:
        """Run a program that writes `file`, and return its lines. `text` says what the program does, `fractions` are
        completed before and after it, and `failed` precedes the reason for a failure. Raises TrainError, Stopped."""
        begin, end = fractions
        self._phase("converting", text, begin)

        def report(line: str) -> None:
            done = int(match[1]) / 100 if (match := PROGRESS.search(line)) else 0.0
            self._progress("converting", text, begin + (end - begin) * done)

        code, lines = self._run_program(command, report, llama_cpp.variables(environment))
        if code or not file.is_file():
            self.run_log.info("".join(lines[-30:]))
            raise TrainError(failed + (f"its process {describe_end(code)}." if code < 0 else _why(lines)))
        return lines

    def _linked(self, source: Path) -> Path:
        """A folder with links to the files of the model, and to those of the base model that transformers does not save
        and that the converter needs. The converter can run code of the model only if training did."""
        folder = self.folder / SOURCE
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in trained.files_in(source):
            if path.parent == source:
                self._link(path, folder)
        base = base_weights.recorded_folder(self.run.path)
        for name in base_weights.FROM_BASE:
            if base and (base / name).is_file() and not (folder / name).exists():
                (folder / name).symlink_to((base / name).resolve())
        if base and (base / CONFIG).is_file():
            _add_older_keys(folder / CONFIG, base / CONFIG)
        return folder

    def _link(self, file: Path, folder: Path) -> None:
        """Link a file of the model in `folder`; Python code only if training ran it."""
        link = Path.symlink_to if read_spec_outside_training(self.run).model.trust_remote_code else _link_without_code
        link(folder / file.name, file.resolve())

    def _complete_tokenizer_config(self, folder: Path) -> None:
        """Write into the copy of tokenizer_config.json what transformers 5 leaves out and the converter reads there:
        whether the tokenizer adds a BOS token, and the tokens that were added to tokenizer.model. Without the first,
        llama.cpp follows the kind of tokenizer: with Llama 2's, each text would begin with a BOS token."""
        path = folder / TOKENIZER_CONFIG
        own = json.loads(files.read_text(path.resolve())) if path.exists() else {}
        missing = {name: value for name, value in _added_tokens(folder).items() if name not in own}
        if "add_bos_token" not in own:
            tokenizer = model.load_saved_tokenizer(read_spec_outside_training(self.run), folder)
            bos = tokenizer.bos_token_id
            missing["add_bos_token"] = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        if missing:
            path.unlink(missing_ok=True)  # a link to the model's own file
            path.write_text(json.dumps({**own, **missing}), encoding="utf-8")

    def _observe(self, found: trained.TrainedModel) -> tuple[Trained, str]:
        """What the trained model does, and how its base model was identified."""
        spec = read_spec_outside_training(self.run)
        self._phase("loading", "Loading the trained model.", CONVERTED)
        tokenizer = model.load_saved_tokenizer(spec, found.folder)
        whole, batches, of_base, base_check = self._trained_model(
            spec, found, tokenizer, lambda model: gguf_certificate.probes(self.run.path, model, tokenizer)
        )
        self._phase("computing", "Computing the outputs of the trained model.", (CONVERTED + COMPARED) / 2)
        stops = gguf_certificate.stop_tokens(whole, tokenizer)
        observed = gguf_certificate.observe(self.run.path, whole, tokenizer, stops, batches, of_base)
        del whole
        gc.collect()
        return observed, base_check

    def _certify(self, observed: Trained, environment: Path, file: Path, format: str, replaced: str) -> dict[str, Any]:
        def report(done: float) -> None:
            text = "Comparing the file in llama.cpp with the trained model."
            self._progress("comparing", text, COMPARED + (1 - COMPARED) * done)

        server = self._server(environment, file)
        try:
            return gguf_certificate.certify(observed, server, format, report, replaced)
        finally:
            server.close()

    def _server(self, environment: Path, file: Path) -> llama_cpp.Server:
        return llama_cpp.Server(file, environment, self.folder / LOG_FILE)

    def _keep(self, certificate: dict[str, Any], tokenizer: Any, file: Path) -> None:
        """Move the file to its place, unless it differs: then only the certificate is kept. Raises TrainError."""
        if certificate["differences"]:
            files.write_json(self.folder / RESULT, {"model": "", "certificate": certificate})
            why = certificate["differences"][0]
            raise TrainError(f"The GGUF file differs from the trained model and was deleted. {why}")
        system = system_prompt.of_run(self.run.path / SPEC)
        certificate[SYSTEM_PROMPT] = bool(system)
        write_certificate(file.parent / CERTIFICATE, certificate)
        self._write_settings(file, tokenizer, certificate["stop_tokens"], system)
        file.parent.replace(self.folder / FOLDER)

    def _write_settings(self, file: Path, tokenizer: Any, stops: Sequence[str], system: str) -> None:
        """Modelfile and preset for the programs that use the file."""
        about = (tokenizer, stops, system)
        if text := modelfile.write(file.name, *about):
            (file.parent / MODELFILE).write_text(text, encoding="utf-8")
        if text := lm_studio.write(file.stem, *about):
            (file.parent / PRESET).write_text(text, encoding="utf-8")


def _why(lines: Sequence[str]) -> str:
    """The reason why the program that wrote these lines failed."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote no message")
    for pattern, reason in KNOWN_ERRORS.items():
        if re.search(pattern, last):
            return reason
    return f"{last} (see the log for the program's output)"


def _add_older_keys(config: Path, base: Path) -> None:
    """Copy keys of the base model's config.json that the model's own file lacks: transformers 5 no longer writes some
    keys that the converter reads, such as n_ctx of GPT-2."""
    own, older = (json.loads(files.read_text(path.resolve())) for path in (config, base))
    plain = {name: value for name, value in older.items() if not isinstance(value, dict)}  # no vision part
    if missing := {name: value for name, value in plain.items() if name not in own and name not in OF_WEIGHTS}:
        config.unlink()  # a link to the model's own file
        config.write_text(json.dumps({**missing, **own}), encoding="utf-8")


def _added_tokens(folder: Path) -> dict[str, Any]:
    """The added tokens of a tokenizer with tokenizer.model, as transformers 4 wrote them into tokenizer_config.json.
    The converter does not look for them in tokenizer.json, and would convert them to unused tokens."""
    tokenizer = folder / TOKENIZER
    if not tokenizer.exists() or not any((folder / name).exists() for name in base_weights.FROM_BASE):
        return {}
    added = json.loads(files.read_text(tokenizer.resolve())).get("added_tokens", ())
    return {ADDED: {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added}}


def _link_without_code(link: Path, file: Path) -> None:
    """Link a file of the model, unless it is Python code. A file that refers to code, even in a repository, is copied
    without `auto_map`: llama.cpp's converter loads tokenizers with trust_remote_code=True."""
    if link.suffix == ".py":
        return
    try:
        values = json.loads(files.read_text(file)) if link.suffix == ".json" else None
    except ValueError:  # transformers cannot read it either
        values = None
    if isinstance(values, dict) and "auto_map" in values:
        del values["auto_map"]
        link.write_text(json.dumps(values), encoding="utf-8")  # Python's json, since a value may be Infinity
    else:
        link.symlink_to(file)
