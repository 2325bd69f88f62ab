"""A LLaMA-Factory YAML from the page: imported, checked, and trained by Footplate and by LLaMA-Factory, with comparable
losses."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import expect
from served import serving
from test_journeys import (
    choose,
    open_page,
    open_section,
    show_more_options,
    start_run,
    type_value,
    wait_for_state,
    wait_for_status,
)

from backend.paths import ASSETS, cache_folder

sys.path.append(str(Path(__file__).parent.parent / "process"))
from llamafactory_env import llamafactory_environment
from training_runs import losses

pytestmark = pytest.mark.soak
EXAMPLES = 16
CONFIG = {
    "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
    "dataset": "few", "cutoff_len": 256, "template": "chatml", "output_dir": "saves/x", "logging_steps": 1,
    "save_steps": 4, "per_device_train_batch_size": EXAMPLES, "learning_rate": 1e-4, "max_steps": 8,
    "lr_scheduler_type": "cosine", "bf16": False, "use_cpu": True,
}  # fmt: skip


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "runs") as started:
        yield started


@pytest.fixture
def config(tmp_path):
    """A file as users of LLaMA-Factory have it, with its dataset_info.json."""
    data = tmp_path / "data"
    data.mkdir()
    lines = (ASSETS / "trains/train.jsonl").read_text().splitlines(True)[:EXAMPLES]
    (data / "few.jsonl").write_text("".join(lines))
    (data / "dataset_info.json").write_text(json.dumps({"few": {"file_name": "few.jsonl"}}))
    model = {"model_name_or_path": str(cache_folder() / "models/tiny-llama"), "dataset_dir": str(data)}
    path = tmp_path / "lora_sft.yaml"
    path.write_text(yaml.safe_dump({**model, **CONFIG}))
    return path


def import_config(page, server, config):
    open_page(page, server)
    expect(page.locator("body[data-ready]")).to_be_attached()
    page.locator("#fp-import-file").set_input_files(config)
    expect(page.locator("#lora-r input").first).to_have_value("8")
    wait_for_status(page, "^Can run")
    open_section(page, "launch")
    show_more_options(page, "launch")
    choose(page, "launch.device", "cpu")


def test_a_yaml_is_trained_by_both(server, page, config):
    environment = llamafactory_environment()
    import_config(page, server, config)
    own = start_run(page, server)
    wait_for_state(page, "done")

    import_config(page, server, config)
    choose(page, "launch.trainer", "llamafactory")
    wait_for_status(page, "^Cannot run")
    expect(page.locator("[data-code=LLF001]")).to_contain_text("No environment is set")
    type_value(page, "llamafactory.environment", str(environment))
    type_value(page, "llamafactory.template", "chatml")
    wait_for_status(page, "^Can run")
    page.locator("#fp-preview-tabs").get_by_text("train.yaml", exact=True).click()
    expect(page.locator("#fp-preview-text")).to_contain_text("template: chatml")
    other = start_run(page, server)
    wait_for_state(page, "done")
    expect(page.locator("#fp-run-page")).to_contain_text("8 steps in")
    assert own.checkpoints() == other.checkpoints() == [4, 8]
    ours, theirs = (list(losses(run.path).values()) for run in (own, other))
    assert len(ours) == len(theirs) == 8
    assert theirs == pytest.approx(ours, abs=0.05)
