"""Several datasets in the form: a card for each one after the first."""

from __future__ import annotations

import json
import time

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


def drop(page, place, name, text):
    """Drop a file on an element, as a browser does it."""
    page.evaluate(
        """([place, name, text]) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([text], name, { lastModified: 1 }));
          for (const type of ["dragover", "drop"])
            document.querySelector(place).dispatchEvent(
              new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
        }""",
        [place, name, text],
    )


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

    # An error of this dataset is shown at its own field, to which the finding leads.
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
    card_field(page, 1, "weight").fill("-1")
    page.locator("#fp-findings").get_by_role("button", name="Dataset 2: Use the demo dataset").click()
    expect(card_field(page, 1, "source")).to_have_value("builtin")
    expect(card_field(page, 1, "weight")).to_have_value("-1")  # what was entered stays
    assert value(page, "data.source") == "builtin" and sources(page)[0] == {}
    settled(page)
    # The copy of a run with a change of one of its datasets has the datasets of the run, not those of the form.
    copied = [{}, {"source": "files", "files": ["/data/a.jsonl"]}]
    page.evaluate(
        """async (copied) => (await import("./footplate/build/form.js")).setValues(
          { "data.sources": JSON.stringify(copied), "data.sources[1].format": "auto" })""",
        copied,
    )
    assert sources(page) == [{}, {**copied[1], "format": "auto"}]
    settled(page)


@pytest.mark.soak
def test_columns_of_the_second_dataset_are_chosen_by_clicking(page, tmp_path):
    (tmp_path / "rows.csv").write_text("frage,antwort\n" + "2 + 2?,Four.\n" * 9)
    page.locator("#fp-datasets").get_by_role("button", name="Add a dataset").click()
    card_field(page, 1, "source").select_option("files")
    card_field(page, 1, "files").fill(str(tmp_path / "rows.csv"))
    page.locator("#fp-findings").get_by_role("button", name="Choose columns").click()
    # Whoever corrects a choice does so before the server has said what the first choice changes.
    page.route("**/api/columns/use", lambda route: (time.sleep(0.3), route.continue_()))
    for use in ("completion", "prompt"):
        page.get_by_label("Use of column frage").select_option(use)
    expect(card_field(page, 1, "prompt_column")).to_have_value("frage")
    expect(card_field(page, 1, "completion_column")).to_have_value("")
    page.get_by_label("Use of column antwort").select_option("completion")
    expect(page.locator("#fp-example-datasets")).to_contain_text("Dataset 2 (rows.csv)")
    expect(card_field(page, 1, "prompt_column")).to_have_value("frage")  # once the server has said what was chosen
    expect(card_field(page, 1, "completion_column")).to_have_value("antwort")
    uses = {"format": "prompt_completion", "prompt_column": "frage", "completion_column": "antwort"}
    assert sources(page)[1].items() >= uses.items()
    assert value(page, "data.format") == "auto" and value(page, "data.prompt_column") == ""
    expect(page.locator("#fp-datasets")).to_contain_text("8 examples per epoch")
    settled(page)
    # Another program changes the file: the card shows its columns when the user comes back.
    page.wait_for_load_state("networkidle")  # the columns are drawn
    (tmp_path / "rows.csv").write_text("frage,antwort,quelle\n" + "2 + 2?,Four.,book\n" * 9)
    page.evaluate("() => window.dispatchEvent(new Event('focus'))")
    expect(page.get_by_label("Use of column quelle")).to_be_attached()
    settled(page)


def test_files_are_uploaded_where_they_are_dropped(page, shared):
    """On a card, they are that dataset's; on the validation files, those; elsewhere, the first dataset's."""
    folder = shared.runs / ".uploads"
    rows = f"{json.dumps(ROW)}\n" * 30
    page.locator("#fp-datasets").get_by_role("button", name="Add a dataset").click()
    drop(page, ".fp-dataset h4", "card.jsonl", rows)
    expect(card_field(page, 1, "files")).to_have_value(str(folder / "card.jsonl"))
    assert sources(page)[1] == {"source": "files", "files": [str(folder / "card.jsonl")]}
    drop(page, "#fp-section-model", "first.jsonl", rows + "\n")
    expect(page.locator("#data-files textarea")).to_have_value(str(folder / "first.jsonl"))
    page.locator("#data-validation").get_by_text("Local files", exact=True).click()
    drop(page, "#data-validation_files textarea", "other.jsonl", rows + "\n\n")
    expect(page.locator("#data-validation_files textarea")).to_have_value(str(folder / "other.jsonl"))
    page.get_by_role("button", name="Undo").last.click()
    expect(page.locator("#data-validation_files textarea")).to_have_value("")
    drop(page, "#fp-section-data", "notes.docx", "x")
    expect(page.locator("#fp-toasts")).to_contain_text("'notes.docx' is not a data file.")
    expect(page.locator("#data-files textarea")).to_have_value(str(folder / "first.jsonl"))

    # The list: a file is used again, and deleted after a question; what used it is checked again.
    page.get_by_role("button", name="Uploaded files").click()
    dialog = page.get_by_role("dialog", name="Uploaded files")
    expect(dialog.locator("li")).to_have_count(3)
    expect(dialog.locator("li", has_text="first.jsonl").get_by_role("button", name="Use")).to_be_disabled()
    dialog.locator("li", has_text="other.jsonl").get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").last.get_by_role("button", name="Delete").click()
    expect(dialog.locator("li")).to_have_count(2)
    assert not (folder / "other.jsonl").exists()
    dialog.locator("li", has_text="card.jsonl").get_by_role("button", name="Use").click()
    expect(page.locator("#data-files textarea")).to_have_value(str(folder / "card.jsonl"))
    settled(page)
    page.get_by_role("button", name="Uploaded files").click()
    dialog.locator("li", has_text="card.jsonl").get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").last.get_by_role("button", name="Delete").click()
    expect(page.locator("#fp-findings")).to_contain_text("card.jsonl: does not exist")
    dialog.get_by_role("button", name="Close").click()


@pytest.mark.soak  # tests/unit/test_uploads.py has the requests
def test_an_upload_survives_a_lost_connection_and_can_be_canceled(page, shared):
    parts, row = [], page.locator("#fp-uploads")

    def lose(route):
        parts.append(route.request.url)
        route.abort() if len(parts) in (2, 3) else route.continue_()

    page.route("**/api/uploads?**", lose)
    drop(page, "#fp-section-data", "long.jsonl", f"{json.dumps(ROW)}\n" * 90_000)  # two parts
    expect(row).to_contain_text("long.jsonl: the server does not respond, retrying")
    path = shared.runs / ".uploads/long.jsonl"
    expect(page.locator("#data-files textarea")).to_have_value(str(path))
    assert path.stat().st_size == len(f"{json.dumps(ROW)}\n") * 90_000 > 4 * 2**20
    assert len(parts) == 5

    page.unroute("**/api/uploads?**")
    page.route("**/api/uploads?**offset=4194304", lambda route: route.abort())
    drop(page, "#fp-section-data", "large.jsonl", f"{json.dumps(ROW)} \n" * 90_000)
    expect(row.get_by_role("progressbar")).to_be_visible()
    expect(row).to_contain_text("large.jsonl: the server does not respond, retrying")
    row.get_by_role("button", name="Cancel").click()
    expect(page.locator("#fp-toasts")).to_contain_text("Upload the same file again within 7 days to continue it.")
    expect(row.get_by_role("button", name="Upload files")).to_be_visible()
    expect(page.locator("#data-files textarea")).to_have_value(str(path))
    page.unroute("**/api/uploads?**offset=4194304")


@pytest.mark.soak
def test_files_whose_dataset_was_removed_meanwhile_change_no_other(page, shared):
    add = page.locator("#fp-datasets").get_by_role("button", name="Add a dataset")
    add.click()
    add.click()
    card_field(page, 2, "source").select_option("files")
    card_field(page, 2, "files").fill("third.jsonl")
    third = sources(page)[2]
    page.route("**/api/uploads?**", lambda route: route.abort())
    drop(page, ".fp-dataset h4", "second.jsonl", f"{json.dumps(ROW)}\n" * 30)
    expect(page.locator("#fp-uploads")).to_contain_text("second.jsonl: the server does not respond, retrying")
    page.get_by_role("button", name="Remove dataset 2").click()
    page.unroute("**/api/uploads?**")
    expect(page.locator("#fp-toasts")).to_contain_text("its dataset changed meanwhile: choose it in Uploaded files.")
    assert sources(page)[1:] == [third]
    # A dataset whose number has changed still gets its file.
    add.click()
    page.route("**/api/uploads?**", lambda route: route.abort())
    drop(page, ".fp-dataset:last-of-type h4", "last.jsonl", f"{json.dumps(ROW)}\n" * 31)
    page.get_by_role("button", name="Remove dataset 2").click()
    page.unroute("**/api/uploads?**")
    expect(page.locator("#fp-toasts")).to_contain_text("set as the data files of dataset 2.")
    assert sources(page)[1]["files"] == [str(shared.runs / ".uploads/last.jsonl")]
    drop(page, "#fp-section-data", "empty.jsonl", "")
    expect(page.locator("#fp-toasts")).to_contain_text("empty.jsonl is empty.")


def test_paths_are_completed_with_the_keyboard(page, tmp_path):
    (tmp_path / "corpus").mkdir()
    for name in ("a.jsonl", "b.csv", "notes.rst"):
        (tmp_path / "corpus" / name).write_text("")
    page.locator("#data-source").get_by_text("Local files", exact=True).click()
    field, names = page.locator("#data-files textarea"), page.locator("#fp-paths [role=option]")
    field.fill(f"first.jsonl\n{tmp_path}/co")
    expect(names).to_have_text(["corpus/"])
    field.press("ArrowDown")
    assert field.get_attribute("aria-activedescendant") == names.first.get_attribute("id")
    field.press("Enter")
    expect(names).to_have_text(["a.jsonl", "b.csv"])
    field.press("ArrowUp")
    field.press("Tab")
    expect(names).to_have_count(0)
    expect(field).to_have_value(f"first.jsonl\n{tmp_path}/corpus/b.csv")
    expect(field).to_be_focused()
    assert value(page, "data.files") == f"first.jsonl\n{tmp_path}/corpus/b.csv"
    field.press("Backspace")
    expect(names).to_have_text(["b.csv"])
    names.first.click()
    expect(field).to_be_focused()
    field.press("Backspace")
    expect(names).to_have_count(1)
    field.press("Escape")
    expect(names).to_have_count(0)
    page.locator("#model-source").get_by_text("Local folder", exact=True).click()
    folder = page.locator("#model-path :is(input, textarea)")
    folder.fill(f"{tmp_path}/corpus/")
    page.wait_for_timeout(300)
    expect(names).to_have_count(0)  # it has no folders


@pytest.mark.soak
def test_only_paths_that_begin_with_what_was_typed_are_accepted(page, tmp_path):
    """Also while the answer is late, and below a first line that is empty."""
    (tmp_path / "corpus").mkdir()
    for name in ("a.jsonl", "b.csv"):
        (tmp_path / "corpus" / name).write_text("")
    page.locator("#data-source").get_by_text("Local files", exact=True).click()
    field, names = page.locator("#data-files textarea"), page.locator("#fp-paths [role=option]")
    field.fill(f"\n{tmp_path}/corpus/")
    expect(names).to_have_count(2)
    held = []  # answers that are late
    page.route("**/api/paths?**", lambda route: held.append(route))
    field.press_sequentially("b")
    field.press("ArrowDown")
    field.press("Enter")
    expect(field).to_have_value(f"\n{tmp_path}/corpus/b.csv")
    field.press("Control+Home")
    field.press("Delete")
    field.press("ArrowDown")
    for route in held:
        route.abort()
    page.unroute("**/api/paths?**")
