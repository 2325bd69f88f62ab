"""Several datasets in the form: a card for each one after the first."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect
from test_drafts_page import settled, value

ROW = {"instruction": "Count.", "input": "", "output": "One, two."}


@pytest.fixture
def page(same_page):
    same_page.show_build()
    return same_page.page


def card_field(page, index, name):
    return page.locator(f"#data-sources-{index}-{name} :is(input, select, textarea)")


def sources(page):
    return json.loads(value(page, "data.sources") or "[]")


def test_a_dataset_is_added_described_and_removed(page, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 40)
    box, weight = page.locator("#fp-datasets"), page.locator("#data-weight")
    expect(weight).to_be_hidden()
    box.get_by_role("button", name="Add a dataset").click()
    expect(card_field(page, 1, "source")).to_be_focused()
    expect(weight).to_be_visible()
    assert sources(page) == [{}, {"source": "builtin"}]
    expect(card_field(page, 1, "builtin")).to_be_visible()
    card_field(page, 1, "source").select_option("files")
    expect(card_field(page, 1, "builtin")).to_be_hidden()
    expect(card_field(page, 1, "prompt_column")).to_be_hidden()

    # What is wrong with it is said at its own field, to which the finding leads.
    card_field(page, 1, "files").fill("nowhere.jsonl")
    expect(page.locator("#data-sources-1-files")).to_have_attribute("data-level", "error")
    expect(page.locator("#data-files")).not_to_have_attribute("data-level", "error")
    card_field(page, 1, "weight").fill("-1")
    finding = page.locator("#fp-findings").get_by_text("Weight of dataset 2 must be greater than 0, but is -1.")
    expect(finding).to_be_visible()
    page.locator("#fp-findings").get_by_role("button", name="Weight of dataset 2").click()
    expect(card_field(page, 1, "weight")).to_be_focused()

    # Typing keeps the focus; the card says what the dataset contributes.
    card_field(page, 1, "weight").fill("3")
    card_field(page, 1, "files").fill(str(tmp_path / "rows.jsonl"))
    expect(box).to_contain_text("114 examples per epoch from 38 (3x)")
    expect(card_field(page, 1, "files")).to_be_focused()
    wanted = [{}, {"source": "files", "weight": 3, "files": [str(tmp_path / "rows.jsonl")]}]
    assert sources(page) == wanted
    settled(page)
    page.locator("#fp-preview").get_by_role("tab", name="spec.yaml").click()
    expect(page.locator("#fp-preview")).to_contain_text("weight: 3.0")

    # A dataset that is removed comes back with one click, also in the cards.
    box.get_by_role("button", name="Remove dataset 2").click()
    assert sources(page) == []
    expect(card_field(page, 1, "files")).to_have_count(0)
    page.get_by_role("button", name="Undo").last.click()
    assert sources(page) == wanted
    expect(card_field(page, 1, "files")).to_have_value(str(tmp_path / "rows.jsonl"))
    expect(card_field(page, 1, "weight")).to_have_value("3")


def test_a_fix_changes_only_its_dataset(page, tmp_path):
    page.locator("#fp-datasets").get_by_role("button", name="Add a dataset").click()
    card_field(page, 1, "source").select_option("files")
    card_field(page, 1, "files").fill("nowhere.jsonl")
    card_field(page, 1, "weight").fill("-1")
    page.locator("#fp-findings").get_by_role("button", name="Dataset 2: Use the demo dataset").click()
    expect(card_field(page, 1, "source")).to_have_value("builtin")
    expect(card_field(page, 1, "weight")).to_have_value("-1")  # what was entered stays
    assert value(page, "data.source") == "builtin" and sources(page)[0] == {}
    settled(page)


def test_columns_of_the_second_dataset_are_chosen_by_clicking(page, tmp_path):
    (tmp_path / "rows.csv").write_text("frage,antwort\n" + "2 + 2?,Four.\n" * 9)
    page.locator("#fp-datasets").get_by_role("button", name="Add a dataset").click()
    card_field(page, 1, "source").select_option("files")
    card_field(page, 1, "files").fill(str(tmp_path / "rows.csv"))
    page.locator("#fp-findings").get_by_role("button", name="Choose columns").click()
    for column, use in (("frage", "prompt"), ("antwort", "completion")):
        page.get_by_label(f"Use of column {column}").select_option(label=use.capitalize())
        expect(page.get_by_label(f"Use of column {column}")).to_have_value(use)
    expect(page.locator("#fp-example-datasets")).to_contain_text("Dataset 2 (rows.csv)")
    assert {"format": "prompt_completion", "prompt_column": "frage"}.items() <= sources(page)[1].items()
    assert value(page, "data.format") == "auto" and value(page, "data.prompt_column") == ""
    expect(card_field(page, 1, "prompt_column")).to_have_value("frage")
    expect(page.locator("#fp-datasets")).to_contain_text("8 examples per epoch")
    settled(page)
