"""Environments for other trainers and for GGUF files: the commands that create them, and what is found before a run."""

import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from backend import environments
from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import InputFacts
from backend.inspect.other_trainer import inspect_trainer
from backend.machine import Gpu, Machine
from backend.paths import HOME
from backend.preflight import preflight
from backend.rules import check
from backend.rules.examples import H100, NPU


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def commands(cache, monkeypatch):
    """Record the commands, and make what they would have made."""
    found = []

    def run(*command):
        found.append(command)
        folder = environments.environment_folder("llamafactory")
        if "venv" in command:
            (folder / "bin").mkdir(parents=True)
            (folder / "bin/python").symlink_to(sys.executable)
        elif "llamafactory==0.9.5" in command:
            planted(folder, "0.9.5")
            stand_in = Path(next(word for word in command if "torchaudio" in word))
            assert 'name = "torchaudio"' in (stand_in / "pyproject.toml").read_text()

    monkeypatch.setattr(environments, "_run", run)
    return found


def planted(folder, version):
    info = folder / f"lib/python3.11/site-packages/llamafactory-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llamafactory\nVersion: {version}\n")


def test_create(commands, cache, capsys):
    assert main(["env", "list"]) == 0
    assert capsys.readouterr().out.startswith("No environment exists.")
    assert main(["env", "create", "llamafactory", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["folder"] == str(cache / "environments/llamafactory") and shown[0]["bytes"] > 0
    assert shown[0]["versions"] == {"llamafactory": "0.9.5"}
    packages, alone = commands[1], commands[2]
    assert "transformers==5.6.0" in packages and "--no-deps" not in packages
    assert "--no-deps" in alone and alone[-1] == "llamafactory==0.9.5"
    assert not any("http" in word for command in commands for word in command), "pip's own index"


@pytest.fixture
def gguf_commands(cache, monkeypatch):
    """Record the commands of the environment gguf with their requirements, and make what pip would have made."""
    found = []

    def run(*command, cwd=None, env=None):
        path = Path(command[-1])
        found.append((command, path.read_text() if "--requirement" in command else "", env))
        if "download" in command:
            with tarfile.open(path.parent / "llama_cpp_python-0.3.36.tar.gz", "w:gz") as archive:
                for name in ("vendor/llama.cpp/conversion/base.py", "vendor/llama.cpp/ggml/a.c", "setup.py"):
                    archive.addfile(tarfile.TarInfo(f"llama_cpp_python-0.3.36/{name}"))
        if "--target" in command:
            info = Path(command[command.index("--target") + 1]) / "xllamacpp-1.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 1.0\n")
        if "--print-supported-models" in command:
            assert not list(environments.created()), "complete only when everything was imported"

    monkeypatch.setattr(environments, "_run", run)
    return found


def test_the_environment_for_gguf(gguf_commands, cache):
    folder = environments.create("gguf", lambda _: None)
    assert folder == cache / "environments/gguf" and environments.is_complete("gguf")
    assert environments.versions("gguf") == {"llama-cpp-python": "0.3.36", "xllamacpp": "1.0"}
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [environments.COMPLETE, "llama.cpp/conversion/base.py", "packages/xllamacpp-1.0.dist-info/METADATA"]
    (venv, *_), helpers, source, packages, runtime, converter = gguf_commands
    assert venv[:3] == (sys.executable, "-m", "venv")
    for command, requirements, _ in (helpers, source, packages):
        assert "--require-hashes" in command and "--no-deps" in command
        assert all("--hash=sha256:" in line and "==" in line for line in requirements.splitlines())
    assert "--no-build-isolation" in source[0] and "llama-cpp-python==0.3.36 " in source[1]
    assert [line.split()[0] for line in packages[1].splitlines()] == [
        "sentencepiece==0.2.3",
        "xllamacpp==2026.10.11549",
    ]
    for probe in (runtime, converter):
        assert probe[0][0] == sys.executable and probe[2]["PYTHONPATH"] == f"{folder / 'packages'}:{HOME}"


def test_the_environment_for_benchmarks(gguf_commands, cache, capsys):
    assert main(["env", "create", "lm-eval"]) == 0
    shown = capsys.readouterr()
    assert "This downloads 56 MB" in shown.err.splitlines()[0], "before anything is downloaded"
    folder = cache / "environments/lm-eval"
    _, (command, requirements, _), (probe, *_) = gguf_commands
    assert {"--require-hashes", "--no-deps", "--target", str(folder / "packages")} <= set(command)
    assert requirements.startswith("lm-eval==0.4.13 --hash=sha256:")
    assert all(line.count(" --hash=sha256:") == line.count("--hash") > 0 for line in requirements.splitlines())
    assert probe[1:] == ("-m", "backend.inference.benchmark_probe", ".")
    assert main(["env", "remove"]) == 2 and folder.exists()
    assert "Name the environment to remove" in capsys.readouterr().err
    assert main(["env", "remove", "lm-eval"]) == 0
    assert not folder.exists() and "No environment exists." in capsys.readouterr().out
    assert main(["env", "remove", "lm-eval"]) == 1
    assert "The environment lm-eval does not exist" in capsys.readouterr().err


HOPPER = Machine(
    "cuda", (Gpu(0, "H100", 2**36, 2**36, (9, 0)),), disk_free_bytes=20 * 10**9, driver_version="580.95.05"
)


@pytest.fixture
def vllm_commands(cache, monkeypatch):
    """Record the commands of the environment vllm with their requirements, and make the wheels that pip would download;
    the third download is interrupted once."""
    found, is_cut = [], [True]

    def run(*command, cwd=None, env=None):
        lines = Path(command[-1]).read_text().splitlines() if "--requirement" in command else []
        found.append((command, lines))
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        if "download" in command:
            assert env["TMPDIR"] == command[command.index("--dest") + 1]
            if is_cut and len(found) == 4:
                is_cut.pop()
                raise environments.CreationError("the connection was lost")
            (Path(command[command.index("--dest") + 1]) / f"{len(lines)}-{lines[0].split('==')[0]}.whl").touch()

    monkeypatch.setattr(environments, "_run", run)
    monkeypatch.setattr(environments, "probe", lambda _: HOPPER)
    return found


def test_the_environment_for_vllm(vllm_commands, cache, capsys):
    folder, wheels = cache / "environments/vllm", cache / "environments/vllm.wheels"
    assert main(["env", "create", "vllm"]) == 1
    shown = capsys.readouterr().err
    cost = (
        "This downloads 4.3 GB (6 minutes at 100 Mbit/s), needs 14 GB of disk space during the installation, and 9 GB "
        "afterwards"
    )
    assert cost in shown.splitlines()[0] and "the connection was lost" in shown
    assert len(list(wheels.iterdir())) == 2 and not environments.is_complete("vllm"), "what was downloaded is kept"
    vllm_commands.clear()
    assert main(["env", "create", "vllm"]) == 0
    assert environments.is_complete("vllm") and not wheels.exists()
    (venv, _), *downloads, (install, lines), (cuda, _), (arguments, _) = vllm_commands
    assert venv[1:3] == ("-m", "venv") and [line for _, part in downloads for line in part] == lines
    for command, part in [*downloads, (install, lines)]:
        assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(command)
        assert all("==" in line and "--hash=sha256:" in line for line in part)
    assert "--no-index" in install and install[install.index("--find-links") + 1] == str(wheels)
    assert "torch.cuda.is_available()" in cuda[2] and "--lora-modules" in arguments
    assert len(lines) > 190 and {"vllm==0.33.0", "torch==2.14.0"} <= {line.split()[0] for line in lines}
    wheels.mkdir()
    assert main(["env", "remove", "vllm"]) == 0 and not folder.exists() and not wheels.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"driver_version": "", "gpus": ()}, "needs an NVIDIA GPU and its driver, and this machine lacks one"),
        ({"driver_version": "570.1"}, "needs NVIDIA driver 580 or later; 570.1 is installed"),
        ({"gpus": (Gpu(0, "V100", 1, 1, (7, 0)),)}, "compute capability 7.5 or later; this machine has V100"),
        ({"disk_free_bytes": 9 * 10**9}, "has 9.0 GB of free disk space; creating the environment vllm needs 13.7 GB"),
    ],
)
def test_machines_without_vllm(vllm_commands, cache, monkeypatch, capsys, change, reason):
    monkeypatch.setattr(environments, "probe", lambda _: replace(HOPPER, **change))
    (cache / "environments/vllm").mkdir(parents=True)
    (cache / "environments/vllm" / environments.COMPLETE).touch()
    assert main(["env", "create", "vllm"]) == 1
    assert reason in capsys.readouterr().err and not vllm_commands
    assert environments.is_complete("vllm"), "the earlier one is kept"


def test_an_environment_that_cannot_be_imported_is_not_used(gguf_commands, cache, monkeypatch):
    environments.create("gguf", lambda _: None)
    build = environments._run

    def run(*command, **options):
        if "-c" in command:
            raise environments.CreationError("import xllamacpp failed")
        build(*command, **options)

    monkeypatch.setattr(environments, "_run", run)
    with pytest.raises(environments.CreationError):
        environments.create("gguf", lambda _: None)
    assert not environments.is_complete("gguf"), "the earlier one was replaced"


def test_a_failed_installation_is_a_sentence(cache, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["env", "create"]) == 1
    assert "failed" in capsys.readouterr().err
    assert not list(environments.created()), "it has no mark of completeness"


def problem(spec, tmp_path):
    return inspect_trainer(edit(RunSpec(), spec), tmp_path)["trainer_problem"]


def lacking(spec, tmp_path, machine=H100, **facts):
    """What LLF001 says about the packages of the environment."""
    run = edit(RunSpec(), spec)
    found = check(run, machine, InputFacts(**inspect_trainer(run, tmp_path), **facts))
    return next((each.message for each in found if each.code == "LLF001"), "")


def test_what_is_wrong_with_an_environment(cache, tmp_path):
    use = {"launch.trainer": "llamafactory", "model.source": "hub", "model.hub_id": "a/b"}
    folder = tmp_path / "env"
    assert problem({}, tmp_path) == ""
    assert problem(use, tmp_path).startswith("No environment is set")
    use |= {"llamafactory.environment": "env"}
    assert "has no bin/python" in problem(use, tmp_path)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    assert problem(use, tmp_path).startswith(f"The environment {folder} has no llamafactory. `footplate env create")
    planted(folder, "0.8.3")
    assert "0.8.3; 0.9 is supported" in problem(use, tmp_path)
    next(folder.glob("lib/*/*/*")).rename(folder / "lib/python3.11/site-packages/llamafactory-0.9.5.dist-info")
    assert problem(use, tmp_path) == ""
    quantized = {**use, "method.quantization": "nf4", "logging.report_to": "wandb"}
    assert "lacks wandb and bitsandbytes, which this run needs" in lacking(quantized, tmp_path)
    for name in ("bitsandbytes-0.50.0", "wandb-0.28.0"):
        (folder / f"lib/python3.11/site-packages/{name}.dist-info").mkdir()
    assert lacking(quantized, tmp_path) == ""
    assert "lacks gptqmodel and optimum" in lacking(use, tmp_path, quant_method="gptq")
    for version, packages in (("4.57.1", "autoawq,"), ("5.6.0", "gptqmodel and autoawq,")):
        transformers = folder / f"lib/python3.11/site-packages/transformers-{version}.dist-info"
        transformers.mkdir()
        assert f"lacks {packages}" in (found := lacking(use, tmp_path, quant_method="awq"))
        transformers.rmdir()
    pip = f"{folder}/bin/pip install"  # also if the option has a relative path
    assert found.endswith(f"Install with: {pip} gptqmodel && {pip} autoawq --no-build-isolation.")
    assert "lacks compressed-tensors" in lacking(use, tmp_path, quant_method="compressed-tensors")
    assert lacking(use, tmp_path, quant_method="fp8") == "" == lacking({}, tmp_path, NPU)
    assert "lacks torch_npu" in lacking(use, tmp_path, NPU)
    more = {**use, "llamafactory.extra_args": '{"mask_history": true, "mask_histori": true, "seed": 1}'}
    assert problem(more, tmp_path) == "", "the arguments are not known"
    for name, line in (
        ("llamafactory/hparams/data_args.py", "mask_history"),
        ("transformers/training_args.py", "seed"),
    ):
        file = folder / "lib/python3.11/site-packages" / name
        file.parent.mkdir(parents=True)
        file.write_text(f"class Arguments:\n    {line}: bool = field(\n")
    assert "has mask_histori, which the LLaMA-Factory in" in problem(more, tmp_path)
    builtin = {**use, "model.source": "builtin"}
    assert "does not exist yet" in problem(builtin, tmp_path)


def test_the_fix_is_the_environment_that_was_created(commands, cache, tmp_path):
    environments.create("llamafactory", lambda _: None)
    spec = edit(
        RunSpec(), {"launch.trainer": "llamafactory", "logging.report_to": "wandb", "parallel.strategy": "zero2"}
    )
    spec = edit(spec, {"train.use_unsloth": True})
    here = Machine(versions={"torch": "2.13.0"})
    found = {finding.code: finding for finding in preflight(spec, here, tmp_path).findings}
    assert not {"HW004", "STR001", "UNS001"} & found.keys(), "Footplate's own packages do not matter"
    assert "makes one" not in found["LLF001"].message
    fix = found["LLF001"].fixes[0]
    assert fix.patch == {"llamafactory.environment": str(cache / "environments/llamafactory")}


def test_an_index_that_cannot_be_reached_is_named(tmp_path):
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found for packaging==26.0' >&2; exit 1\n")
    pip.chmod(0o700)
    with pytest.raises(environments.CreationError, match=r"^pip failed: No matching .*==26\.0\. .*PIP_FIND_LINKS"):
        environments._run(str(pip), "-m", "pip", "download")


def test_a_missing_part_of_python_is_named(tmp_path):
    """Debian's venv says so on stdout."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ensurepip is not\navailable: apt install python3.11-venv'; exit 1\n")
    python.chmod(0o700)
    with pytest.raises(environments.CreationError, match=r"ensurepip is not available: apt install python3\.11-venv$"):
        environments._run(str(python), "-m", "venv", str(tmp_path / "folder"))
