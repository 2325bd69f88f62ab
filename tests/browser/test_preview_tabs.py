"""The tabs of the launch preview with the keyboard."""

import pytest
from playwright.sync_api import expect
from test_journeys import wait_for_status


@pytest.fixture
def page(same_page):
    same_page.show_build()
    return same_page.page


def test_arrow_keys_go_from_tab_to_tab(page):
    """One tab is in the tab order; arrows, Home and End select the others, also after the next check."""
    wait_for_status(page, "^Can run")
    tabs = page.get_by_role("tablist", name="Command and files").get_by_role("tab")
    names = tabs.all_inner_texts()
    assert names[:2] == ["Command", "spec.yaml"] and len(names) > 2
    assert [tab.get_attribute("tabindex") for tab in tabs.all()] == ["0"] + ["-1"] * (len(names) - 1)
    tabs.first.focus()
    for key, name in (
        ("ArrowRight", names[1]), ("ArrowRight", names[2]), ("ArrowLeft", names[1]), ("Home", names[0]),
        ("ArrowLeft", names[-1]), ("ArrowRight", names[0]), ("End", names[-1]),
    ):  # fmt: skip
        page.keyboard.press(key)
        selected = page.get_by_role("tab", name=name, exact=True)
        expect(selected).to_have_attribute("aria-selected", "true")
        expect(selected).to_be_focused()
    page.get_by_role("tab", name="spec.yaml").click()
    expect(page.get_by_role("tabpanel")).to_contain_text("learning_rate:")
    expect(page.get_by_role("tab", name="spec.yaml")).to_be_focused()
