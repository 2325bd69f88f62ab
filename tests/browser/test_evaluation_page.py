"""The card "Evaluation" of a run's page. Its process is replaced by fake_evaluation.py; the real one is in
tests/process."""

import json
from pathlib import Path

from playwright.sync_api import expect
from same_page import show_run
from served import FAKE
from test_accessibility import violations
from test_journeys import SLOW_TIMEOUT
from test_trained_model_page import plant

from backend.models import evaluation
from backend.models.evaluation import Settings
from backend.runs.folder import ALIVE
from backend.scoring.scorer import sha256_of

JUDGE = {"judge_url": "http://127.0.0.1:9/v1", "judge_model": "m1"}
AGREED = {"judge_agreed": "http://127.0.0.1:9/v1/chat/completions"}


def test_from_start_to_examples(shared, page, tmp_path):
    run = plant(shared, "evaluated")
    (run.path / FAKE).write_text(str(Path(__file__).with_name("fake_evaluation.py")))
    show_run(page, run)
    card = page.get_by_role("region", name="Evaluation")
    expect(card).to_contain_text("which shows what the model has forgotten", timeout=SLOW_TIMEOUT)
    for title in ("Settings", "Several samples per prompt", "Your own scores", "LLM judge"):
        card.get_by_text(title, exact=True).click()
    card.get_by_label("Examples").fill("25")
    draw_samples(card)
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, reference, output): return 1")
    refuse_relative_paths(card)
    start_with_code(card, run, file)
    expect(card).to_contain_text("Generating outputs of the trained model (8 of 25).", timeout=SLOW_TIMEOUT)
    expect(card.get_by_role("status")).to_have_text("Evaluating")
    expect(card.get_by_role("button", name="Evaluate")).to_be_hidden()

    card.get_by_role("button", name="Stop evaluation").click()
    expect(card.get_by_role("button", name="Continue")).to_be_visible(timeout=SLOW_TIMEOUT)
    card.get_by_label("Examples").fill("24")
    expect(card.get_by_role("button", name="Evaluate again")).to_be_visible()
    card.get_by_label("Examples").fill("25")
    card.get_by_role("button", name="Continue").click()
    agree(page, file)
    agree_to_judge(page)
    expect(card.get_by_role("button", name="Stop evaluation")).to_be_visible(timeout=SLOW_TIMEOUT)
    (job,) = evaluation.find_all(run)
    code = {"score_file": str(file), "score_file_sha256": sha256_of(str(file))}
    sampling = {"samples_per_prompt": 4, "temperature": 0.8}
    assert evaluation.read_settings(job.path) == Settings(
        examples=25, max_new_tokens=128, **sampling, **code, **JUDGE, **AGREED
    )
    (job.path / "go").touch()
    scores = card.locator(".fp-scores")
    expect(scores).to_contain_text("Exact_Match", timeout=SLOW_TIMEOUT)
    expect(scores.locator("tr[data-verdict=better] td").nth(3)).to_contain_text("Better +")
    expect(scores.locator("tr[data-verdict=unclear]")).to_contain_text("No clear change")
    expect(scores.locator("tr[data-verdict=worse]")).to_contain_text("Loss per token on general texts")
    expect(card).to_contain_text("Limitation: A limit.")
    expect(card).to_contain_text("The judge m1 at http://127.0.0.1:9/v1 preferred the trained model in 5 of 25")
    look_at_examples(card)
    assert violations(page, ".fp-evaluation") == []

    delete_evaluation(card)
    assert not evaluation.find_all(run) and job.state not in ALIVE


def delete_evaluation(card):
    card.get_by_role("button", name="Delete evaluation").click()
    card.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(card.locator(".fp-scores")).to_be_hidden(timeout=SLOW_TIMEOUT)


def draw_samples(card):
    """The card says how many outputs that means."""
    card.get_by_label("Samples per prompt").fill("4")
    expect(card).to_contain_text("Generating at most 200 outputs of both models; how long that takes is known after")
    card.get_by_label("Temperature").fill("0.8")


def refuse_relative_paths(card):
    card.get_by_label("Data file").fill("mine.jsonl")
    card.get_by_role("button", name="Evaluate").click()
    expect(card.page.locator("#fp-toasts")).to_contain_text(
        "mine.jsonl of the data file is relative", timeout=SLOW_TIMEOUT
    )
    card.get_by_label("Data file").fill("")


def start_with_code(card, run, file):
    """The page asks before it starts, each time: for the code, then for the judge."""
    card.get_by_label("Score file").fill(str(file))
    card.get_by_label("Base URL of the judge").fill(JUDGE["judge_url"])
    card.get_by_label("Model of the judge").fill(JUDGE["judge_model"])
    card.get_by_role("button", name="Evaluate").click()
    agree(card.page, file, "Cancel")
    card.get_by_role("button", name="Evaluate").click()
    agree(card.page, file)
    agree_to_judge(card.page, "Cancel")
    assert not evaluation.find_all(run)
    card.get_by_role("button", name="Evaluate").click()
    agree(card.page, file)
    agree_to_judge(card.page)


def agree(page, file, answer="Run this file"):
    """Answer the question whether the code of a score file may run."""
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Run the Python code in {file} (SHA-256 {sha256_of(str(file))})?")
    dialog.get_by_role("button", name=answer).click()


def agree_to_judge(page, answer="Send to the judge"):
    """Answer the question whether outputs may be sent."""
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"requests, plus retries, go to {AGREED['judge_agreed']}. Each has a prompt")
    dialog.get_by_role("button", name=answer).click()


def look_at_examples(card):
    card.get_by_text("Examples", exact=True).click()
    rows = card.locator(".fp-evaluation-examples tbody tr")
    expect(rows).to_have_count(20, timeout=SLOW_TIMEOUT)
    assert card.locator(".fp-evaluation-examples td b").count() == 0, "text of a model is no HTML"
    card.get_by_role("button", name="Show more (5 left)").click()
    expect(rows).to_have_count(25)
    card.get_by_role("button", name="Worse 5").click()
    expect(rows).to_have_count(5)
    expect(rows.first).to_contain_text("Prompt 20")
    rows.first.get_by_text("2 more samples").first.click()
    expect(rows.first.locator(".fp-evaluation-sample").nth(3)).to_have_text("Sample 4: 100.0%Output 3")
    card.get_by_label("Score", exact=True).select_option("chrf")
    expect(card.get_by_role("button", name="Worse 0")).to_be_visible()
    link = card.get_by_role("link", name="Download examples")
    assert len(json.loads(card.page.request.get(link.get_attribute("href")).body())) == 25
