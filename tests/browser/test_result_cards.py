"""The first result card says whether the training has improved the generations."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from same_page import show_run
from test_trained_model_page import plant

from backend.runs import RESULT, generations

SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("before", "after", "text", "gain"),
    [
        pytest.param((0, 0.1), (0, 0.1), "No improvement: exact match on validation examples is 0% before and after "
                     "training.", False, marks=SOAK),
        ((0.25, 0.1), (0.5, 0.4), "Training raised exact match on validation examples from 25% to 50%.", True),
        pytest.param((0.5, 0.1), (0.25, 0.4),
                     "Training lowered exact match on validation examples from 50% to 25%.", False, marks=SOAK),
        ((0, 0.4), (0, 0.1), "Training lowered ROUGE-L from 40% to 10%. "
         "Exact match on validation examples is still 0%.", False),
        ((0, 0.4), (0, 0.42), "No clear change: ROUGE-L was 40% before and 42% after training. "
         "Exact match on validation examples is still 0%. So small a change may be chance: see Evaluation.", False),
    ],
)  # fmt: skip
def test_a_gain_a_loss_and_neither(shared, page, before, after, text, gain):
    run = plant(shared, "results")
    pairs = [("exact_match", 0), ("rouge_l", 1), ("bleu", 1)]
    scores = {f"{name}_{when}": of[i] for name, i in pairs for when, of in (("before", before), ("after", after))}
    Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", **scores}))
    show_run(page, run)
    expect(page.locator(".fp-gain")).to_have_text(text)
    card = page.locator(".fp-results .fp-large")
    expect(card.locator("strong")).to_have_count(int(gain))  # green
    expect(page.locator(".fp-result dt")).to_contain_text(["Exact match on validation examples", "ROUGE-L", "BLEU"])


@pytest.mark.parametrize(
    ("count", "advice"),
    [
        (2, "2 examples are too few to tell what training changed"),
        pytest.param(8, "With 8 examples, a change of one or two can be chance", marks=SOAK),
    ],
)
def test_a_change_on_few_examples_is_no_alarm(shared, page, count, advice):
    run = plant(shared, f"few-{count}")
    samples = [{"prompt": "2 + 2?", "reference": "4", "before": "4", "after": "no"}] * count
    scores = {"exact_match_before": 0.5, "exact_match_after": 0.0}
    Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", "samples": samples, **scores}))
    show_run(page, run)
    gain = page.locator(".fp-gain")
    values = "exact match on validation examples was 50% before and 0% after training."
    expect(gain).to_have_text(f"{advice}: {values}")
    expect(gain).to_have_attribute("data-change", "same")


def test_only_a_run_with_a_measurement_offers_it(shared, page):
    for peaks in ([None], [7 * 2**20]):
        run = plant(shared, f"measured-{peaks[0]}")
        Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", "peak_bytes": peaks}))
        show_run(page, run)
        expect(page.locator(".fp-run-actions a", has_text="log.txt")).to_have_count(1)
        expect(page.locator(".fp-run-actions a", has_text="measurement.json")).to_have_count(int(bool(peaks[0])))


def test_generations_are_filtered_by_what_training_changed(shared, page):
    run = plant(shared, "generations")
    pairs = [("no", "4")] * 5 + [("4", "no")] * 2 + [("4", "4"), ("no", "no")]
    samples = [
        {"prompt": f"2 + 2? {i}", "reference": "4", "before": before, "after": after}
        for i, (before, after) in enumerate(pairs)
    ]
    Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", "samples": samples}))
    show_run(page, run)
    rows = page.locator(".fp-samples tbody tr:visible")
    expect(rows).to_have_count(3)
    expect(page.locator(".fp-sample-filters button")).to_have_text(["All 9", "Better 5", "Worse 2", "Same 2"])
    expect(page.get_by_role("slider", name="Step")).to_be_hidden()
    page.get_by_role("button", name="Worse 2").click()
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("2 + 2? 5")
    page.get_by_role("button", name="Better 5").click()
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Show all 5").click()
    expect(rows).to_have_count(5)


def test_a_slider_shows_the_outputs_of_each_step(shared, page):
    """The run has not ended yet: it has generated before training and at step 10, and then at step 20."""
    run = plant(shared, "timeline")
    Path(run.path, RESULT).unlink(missing_ok=True)
    generations.begin(run.path, [{"prompt": f"2 + {n}?", "reference": str(2 + n)} for n in range(4)], 0)
    add_outputs(run, 0, ["2", "?", "?", "?"])
    add_outputs(run, 10, ["no", "3", "?", "?"])
    page.route("**/generations", lambda route: route.abort(), times=1)  # the request is repeated
    show_run(page, run)
    card = page.get_by_role("region", name="Generations")
    expect(card).to_contain_text("1 of 4 correct before training, 1 at step 10")
    add_outputs(run, 20, ["2", "3", "4", "?"])
    expect(card).to_contain_text("1 of 4 correct before training, 3 at step 20; ROUGE-L 0% \u2192 50%", timeout=10_000)
    expect(card.locator(".fp-sample-filters button:visible")).to_have_text(["All 4", "Better 2", "Same 2"])
    slider = card.get_by_role("slider", name="Step")
    slider.press("ArrowLeft")
    expect(slider).to_have_attribute("aria-valuetext", "Step 10")
    expect(card.locator(".fp-sample-filters button:visible")).to_have_text(["All 4", "Better 1", "Worse 1", "Same 2"])
    first = card.locator("tbody tr").first
    expect(first.locator("td").last).to_have_text("\u2717no")
    expect(first.get_by_role("img", name="Correct: before training, step 20")).to_be_visible()
    slider.press("ArrowLeft")
    expect(card.locator("thead th")).to_have_text(["Prompt", "Reference", "Before training"])
    slider.press("End")
    expect(first.locator("td").last).to_have_text("\u27132")
    generations.begin(run.path, generations.read(run.path)["prompts"], 10)  # it is resumed from step 10
    add_outputs(run, 20, ["another", "3", "4", "?"])
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")  # it asks now, not after 5 seconds
    expect(first.locator("td").last).to_have_text("\u2717another")


def add_outputs(run, step, outputs):
    """The outputs of a step, of which the n-th one should be 2 + n."""
    correct = [output == str(2 + n) for n, output in enumerate(outputs)]
    scores = {"exact_match": sum(correct) / 4, "rouge_l": step / 40}
    line = {
        "step": step,
        "outputs": outputs,
        "correct": correct,
        "scores": scores,
        "rouge_l": list(map(float, correct)),
    }
    generations.append(run.path, line)
