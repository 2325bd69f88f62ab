"""Log in with the token of the printed URL, and with a password; log out."""

import re

import pytest
from playwright.sync_api import expect
from served import serving
from test_accessibility import violations

PASSWORD = "correct horse battery"


def wait_until_ready(page):
    page.wait_for_selector("body[data-ready]")
    expect(page.locator("#fp-status")).to_have_attribute("data-fresh", "yes")


def test_token_url(page, tmp_path):
    """The printed URL logs in, and the token leaves the address. The form to log in is accessible."""
    with serving(tmp_path / "runs", login=True) as server:
        url = server.printed_url()
        assert url.startswith(f"{server.url}/?token=")
        page.goto(f"{server.url}/?tab=runs")
        expect(page.get_by_role("heading", name="Footplate")).to_be_visible()
        assert violations(page) == []
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_have_text("Wrong token.")
        assert violations(page) == []
        page.goto(url, wait_until="commit")  # the next test loads the whole form after a login
        assert "token" not in page.url and page.evaluate("document.cookie") == ""
        page.goto(f"{server.url}/help/getting-started")
        expect(page.get_by_role("heading", name="Getting started", level=1)).to_be_visible()


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    path.chmod(0o600)
    return str(path)


def answer(page, password) -> str:
    """What the form to log in says to a password that is wrong or comes too early."""
    page.get_by_label("Password").fill(password)
    with page.expect_response("**/login"):
        page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    return page.get_by_role("alert").inner_text()


def log_in_after(page, refusal):
    """Log in with the password after the seconds that `refusal` names."""
    page.wait_for_timeout(1000 * (1 + int(re.search(r"(\d+) s\.", refusal)[1])))
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    wait_until_ready(page)


def test_password_and_logout(page, tmp_path, password_file):
    with serving(tmp_path / "runs", login=True, FOOTPLATE_PASSWORD_FILE=password_file) as server:
        assert server.printed_url() == server.url
        page.goto(f"{server.url}/?tab=build")
        # Each wait is twice as long as the one before: on a slow machine, the first ones are over before the next try.
        answers = [answer(page, "wrong")]
        while len(answers) < 12 and "Too many" not in answers[-1]:
            answers.append(answer(page, "wrong"))
        assert answers[:5] == ["Wrong password."] * 5
        assert answers[-1].startswith("Too many wrong attempts. Try again in ")
        log_in_after(page, answers[-1])
        assert page.url == f"{server.url}/?tab=build" or "draft" in page.url
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Password")).to_be_visible()
        page.goto(server.url)
        expect(page.get_by_label("Password")).to_be_visible()


@pytest.mark.soak
def test_a_wrong_password_a_hundred_times(page, tmp_path, password_file):
    """Few attempts are checked; the right password has to wait too, and works afterwards."""
    with serving(tmp_path / "runs", login=True, FOOTPLATE_PASSWORD_FILE=password_file) as server:
        page.goto(server.url)
        answers = [answer(page, f"wrong {number}") for number in range(100)]
        judged = [text for text in answers if text == "Wrong password."]
        assert 5 <= len(judged) <= 10
        assert all("Too many wrong attempts" in text for text in answers if text not in judged)
        refusal = answer(page, PASSWORD)
        assert "Too many wrong attempts" in refusal
        log_in_after(page, refusal)
