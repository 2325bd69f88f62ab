"""An LLM judge, with a stand-in on 127.0.0.1: the requests, their repetition, and the score."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from datetime import date
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from fake_judge import Asked, FakeJudge, Reply, completion, serve_judge
from small import client
from test_chat import LORA, make_run, use_waiter

from backend.__main__ import main
from backend.inference.example_scores import ExampleScores
from backend.inference.judged import JudgeScore
from backend.models import evaluation
from backend.models.evaluation import Settings
from backend.scoring import judge as judges
from backend.scoring.judge import BadAnswer, Client, Judge, JudgeError, verdict_of
from backend.train.generation_eval import EvalPrompt, Generated, plain_text
from backend.train.run_log import Stopped, TrainError

KEY = "sk-judge-s3cret"
PROMPT = EvalPrompt("<user>Capital of France?", "Capital of France?", "Paris", "Capital of France?")


def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("JUDGE_API_KEY", KEY)


def prefer(text: str) -> Any:
    """Decides for the response that contains `text`; without one, the responses are equally good."""

    def decide(asked: Asked) -> Reply:
        found = [letter for letter, response in zip("AB", asked.pair, strict=True) if text in response]
        return f"Because. [[{found[0] if found else 'C'}]]"

    return decide


def settings_of(judge: FakeJudge, **more: Any) -> Settings:
    found = Settings(judge_url=judge.url, judge_model="m1", judge_key="JUDGE_API_KEY", **more)
    assert found.judge
    return replace(found, judge_agreed=found.judge.agreement)


def score_of(judge: FakeJudge, folder: Path, **more: Any) -> JudgeScore:
    return JudgeScore(settings_of(judge, **more), folder, nothing)


def points(score: JudgeScore, number: int, base: str, trained: str) -> list[float | None]:
    """The points of one output of each model."""
    (one,), (other,) = score.of(number, PROMPT, {"base model": [base], "trained model": [trained]})
    return [one, other]


def test_each_pair_is_sent_in_both_orders(tmp_path: Path) -> None:
    with serve_judge(prefer("Paris")) as judge:
        assert points(score_of(judge, tmp_path), 1, "Lyon", "It is Paris.") == [0, 1]
    one, other = judge.asked
    assert one.pair == ("Lyon", "It is Paris.") and other.pair == ("It is Paris.", "Lyon")
    for asked in judge.asked:
        assert asked.path == "/v1/chat/completions"
        assert asked.headers["Authorization"] == f"Bearer {KEY}"
        assert asked.part("prompt") == PROMPT.plain and asked.part("reference_response") == "Paris"
        assert (asked.body["model"], asked.body["temperature"]) == ("m1", 0)
        system, user = asked.body["messages"]
        assert (system["role"], user["role"]) == ("system", "user")
        assert system["content"].startswith(judges.INSTRUCTION) and "[[C]]" in system["content"]
    assert KEY not in (tmp_path / evaluation.VERDICTS_FILE).read_text()


def test_without_a_key_none_is_sent_and_the_instruction_is_replaced(tmp_path: Path) -> None:
    with serve_judge(prefer("b")) as judge:
        settings = replace(settings_of(judge, judge_instruction="Prefer short ones."), judge_key="")
        points(JudgeScore(settings, tmp_path, nothing), 1, "a", "b")
    assert "Authorization" not in judge.asked[0].headers
    assert judge.asked[0].body["messages"][0]["content"].startswith("Prefer short ones.\n\nExplain")


def test_wins_ties_losses_and_disagreements(tmp_path: Path) -> None:
    """A judge that prefers whatever comes first has no preference: its verdicts are ties, and their share is told."""

    def decide(asked: Asked) -> Reply:
        return "[[A]]" if "same" in "".join(asked.pair) else prefer("good")(asked)

    with serve_judge(decide) as judge:
        score = score_of(judge, tmp_path)
        assert points(score, 1, "bad", "good") == [0, 1]
        assert points(score, 2, "good", "bad") == [1, 0]
        assert points(score, 3, "same 1", "same 2") == [0.5, 0.5]
        assert points(score, 4, "x", "y") == [0.5, 0.5]
        assert len(judge.asked) == 6, "the first two examples have the same texts, with the models exchanged"
        assert points(score, 5, "equal", "equal") == [0.5, 0.5]
        assert len(judge.asked) == 6, "identical outputs need no request"
    found = score.summary()
    assert (found["wins"], found["losses"], found["ties"], found["disagreement"]) == (1, 1, 3, 0.25)
    assert (
        "preferred the trained model in 1 and the base model in 1 of 4 comparisons; 2 are ties. In 25% of the"
        in (found["sentence"])
    )
    assert score.limits(5) == []


def test_each_sample_is_compared_with_that_of_the_other_model(tmp_path: Path) -> None:
    with serve_judge(prefer("good")) as judge:
        score = score_of(judge, tmp_path)
        samples = {"base model": ["bad", "good", "bad"], "trained model": ["good", "worse", "other"]}
        assert score.of(1, PROMPT, samples) == [[0, 1, 0.5], [1, 0, 0.5]] and len(judge.asked) == 6
    assert "in 1 and the base model in 1 of 3 comparisons; 1 is a tie." in score.summary()["sentence"]


def test_bad_answers_are_counted_and_named(tmp_path: Path) -> None:
    replies: tuple[Reply, ...] = (
        "A is better.", "[[B]]", (200, completion(None)), "[[A]]", (200, "[" * 200_000), "[[A]]", "[[A]]",
        (413, '{"error": {"message": "too long"}}'),
    )  # fmt: skip
    with serve_judge(prefer("b"), *replies) as judge:
        score = score_of(judge, tmp_path)
        assert [points(score, n, "a", f"b{n}") for n in range(1, 6)] == [*[[None, None]] * 4, [0, 1]]
        again = score_of(judge, tmp_path)
        assert points(again, 1, "a", "b1") == [0.5, 0.5] and len(judge.asked) == 11, "only the missing verdict"
    assert score.limits(1) == [
        "4 of 5 comparisons have no verdict of the judge and are left out of the judge's score (example 1: an answer "
        "without [[A]], [[B]] or [[C]]; example 2: an empty answer; example 3: a response that is no chat completion; "
        f"example 4: HTTP status 413 {HTTPStatus(413).phrase}: too long)."
    ]
    assert score.summary()["without_verdict"] == 4


def test_a_judge_without_any_verdict(tmp_path: Path) -> None:
    with serve_judge(prefer("b"), "no", "no") as judge:
        score = score_of(judge, tmp_path)
        assert points(score, 1, "a", "b") == [None, None]
    assert score.summary()["sentence"].endswith("gave no verdict on any comparison.")


def test_samples_without_a_verdict_are_left_out_of_the_mean(tmp_path: Path) -> None:
    """The sentence, the score and its interval are about the same comparisons."""
    with serve_judge(prefer("good"), "no verdict") as judge:
        settings = settings_of(judge, samples_per_prompt=4, temperature=1.0)
        score = JudgeScore(settings, tmp_path, nothing)
        scores = ExampleScores(settings, [score])
        base = [Generated(text, True) for text in ("a", "b", "good c", "d")]
        row = scores.row(1, PROMPT, {"base": base, "trained": [Generated(f"good {n}", True) for n in range(4)]})
    assert [one["scores"]["judge"] for one in row["samples"]["trained"]] == [None, 1, 0.5, 1]
    assert row["scores"]["judge"] == [pytest.approx(0.5 / 3), pytest.approx(2.5 / 3)]
    found = next(each for each in scores.compare([row]) if each.name == "judge")
    assert found.count == 1 and found.trained == pytest.approx(2.5 / 3)
    assert "trained model in 2 and the base model in 0 of 3 comparisons; 1 is a tie" in score.summary()["sentence"]
    assert score.limits(1)[0].startswith("1 of 4 comparisons has no verdict of the judge and is left out of the")


def test_a_first_example_that_is_refused_does_not_end_the_evaluation(tmp_path: Path) -> None:
    """It may be too long; after a stop, too, and with the verdicts of before."""

    def decide(asked: Asked) -> Reply:
        return (400, "maximum context length") if "long" in "".join(asked.pair) else prefer("b")(asked)

    with serve_judge(decide) as judge:
        score = score_of(judge, tmp_path)
        assert points(score, 1, "long", "b") == [None, None] and points(score, 2, "a", "b") == [0, 1]
        again = score_of(judge, tmp_path)
        points(again, 2, "a", "b")
        assert [points(again, n, "long", f"b{n}") for n in range(3, 9)] == [[None, None]] * 6
        with pytest.raises(TrainError, match="refused the request: HTTP status 400 Bad Request: maximum context"):
            other = score_of(judge, tmp_path)
            for n in range(3):
                points(other, n, "long", f"c{n}")


def test_verdicts_are_kept(tmp_path: Path) -> None:
    """A stop after any request: the same verdicts are not asked for again, those of another judge are."""
    with serve_judge(prefer("b"), "[[A]]", (401, "no")) as judge:
        with pytest.raises(TrainError, match="Outputs and verdicts are kept: evaluate again to continue"):
            points(score_of(judge, tmp_path), 1, "a", "b")
        score = score_of(judge, tmp_path)
        assert points(score, 1, "a", "b") == [0.5, 0.5] and len(judge.asked) == 3
        assert score.summary()["disagreement"] == 1
        assert points(score_of(judge, tmp_path), 1, "a", "b") == [0.5, 0.5] and len(judge.asked) == 3
        assert points(score_of(judge, tmp_path, judge_instruction="x"), 1, "a", "b") == [0, 1]


def ask(judge: FakeJudge, **changes: Any) -> tuple[Client, str]:
    found = Client(replace(Judge(judge.url, "m1", "JUDGE_API_KEY"), **changes), nothing)
    return found, found.ask([{"role": "user", "content": "x"}])


def test_busy_judges_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(Client, "_sleep", lambda self, seconds: slept.append(seconds))
    with serve_judge(lambda _: "[[A]]", (429, "", {"Retry-After": "7"}), (500, ""), (503, "busy"), (529, "")) as judge:
        found, answer = ask(judge)
    assert answer == "[[A]]" and found.retries == 4 and slept == [7, 0.02, 0.04, 0.08]
    with serve_judge(lambda _: (503, f"overloaded {KEY}")) as judge, pytest.raises(JudgeError) as error:
        ask(judge)
    assert len(judge.asked) == judges.TRIES
    assert str(error.value) == "did not answer in 6 tries: HTTP status 503 Service Unavailable: overloaded ****"


def test_a_judge_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "TRIES", 2)
    monkeypatch.setattr(judges, "REQUEST_SECONDS", 0.2)
    problem = r"did not answer in 2 tries: (no answer within 0\.2 seconds|TimeoutError)"
    with serve_judge(lambda _: 1.0) as judge, pytest.raises(JudgeError, match=problem):
        ask(judge)
    with pytest.raises(JudgeError, match="Connection refused"):
        ask(judge)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (
            (401, json.dumps({"error": {"message": f"Incorrect API key: {KEY}"}})),
            r"401 Unauthorized: .*: \*\*\*\*$",
        ),
        ((401, '{"error": {"message": "no: sk-judge\\u002ds3cret"}}'), r"401 Unauthorized: no: \*\*\*\*$"),
        ((404, '{"error": "no\\u001b[2J model m1"}'), r"HTTP status 404 Not Found: no \[2J model m1$"),
        ((302, "", {"Location": "/elsewhere"}), "HTTP status 302 Found$"),
    ],
)
def test_refused_requests_end_the_evaluation(reply: Reply, problem: str) -> None:
    """A redirect is not followed: it would send key and texts somewhere else."""
    with serve_judge(lambda _: reply) as judge, pytest.raises(JudgeError, match=f"^refused the request: .*{problem}"):
        ask(judge)
    assert len(judge.asked) == 1


def test_a_judge_on_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of an evaluation, and the key, would leave the machine without consent."""
    with serve_judge(lambda _: "[[A]]") as judge, serve_judge(lambda _: "[[B]]") as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert ask(judge)[1] == "[[A]]" and not proxy.asked


def test_models_that_accept_no_temperature() -> None:
    refusal = (400, '{"error": {"message": "Unsupported value: temperature"}}')
    with serve_judge(lambda asked: refusal if "temperature" in asked.body else "[[B]]") as judge:
        found, _ = ask(judge)
        found.ask([{"role": "user", "content": "y"}])
    assert [("temperature" in asked.body) for asked in judge.asked] == [True, False, False]


def test_a_stop_does_not_wait_for_an_answer() -> None:
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise Stopped

    with serve_judge(lambda _: stopped.set() or 2.0) as judge:
        began = time.monotonic()
        with pytest.raises(Stopped):
            Client(Judge(judge.url, "m1"), check).ask([])
        assert time.monotonic() - began < 1.5


def test_verdicts_in_answers() -> None:
    assert [verdict_of(f"[[A]] no, [[{letter}]]") for letter in "ABC"] == ["first", "second", "tie"]
    for text in ("A", "[A]", "[[D]]", " "):
        with pytest.raises(BadAnswer):
            verdict_of(text)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("https://api.example.com/v1", "https://api.example.com/v1/chat/completions"),
        ("https://api.example.com", "https://api.example.com/v1/chat/completions"),
        ("https://api.example.com/", "https://api.example.com/v1/chat/completions"),
        ("https://x.com/api/v1/chat/completions", "https://x.com/api/v1/chat/completions"),
    ],
)
def test_the_endpoint(url: str, endpoint: str) -> None:
    assert Judge(url, "m").endpoint == endpoint and not Judge(url, "m", "JUDGE_API_KEY").problem()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"judge_url": "api.example.com"}, "must begin with http:// or https:// and have a host"),
        ({"judge_url": "https://u:p@example.com/v1"}, "must have no user name, query or fragment"),
        ({"judge_url": "https://:p@example.com/v1"}, "must have no user name, query or fragment"),
        ({"judge_url": "https://example.com/v1?"}, "must have no user name, query or fragment"),
        ({"judge_url": "https://example.com:x/v1"}, "must begin with"),
        ({"judge_url": "https://example.com/a b"}, "without spaces"),
        ({"judge_model": ""}, "The name of the judge's model must have"),
        ({"judge_key": "sk-123"}, "never the key itself"),
        ({"judge_key": "HF_TOKEN"}, "ends with _API_KEY"),
        (
            {"judge_key": "NO_SUCH_API_KEY"},
            "The environment variable NO_SUCH_API_KEY, which should have the judge's API key, is not set",
        ),
        ({"judge_url": "http://example.com/v1"}, "JUDGE_API_KEY would be sent without encryption"),
        ({"judge_key": "CRLF_API_KEY"}, "The value of the environment variable CRLF_API_KEY has spaces, line breaks"),
        ({"judge_instruction": "x" * 4001}, "has 4,001 characters"),
        ({"judge_url": ""}, "have no effect without its base URL"),
        ({"examples": 0}, "a judge has no effect without examples"),
    ],
)
def test_what_the_settings_refuse(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], problem: str) -> None:
    monkeypatch.setenv("CRLF_API_KEY", "sk-123\r")
    given = {"judge_url": "https://example.com/v1", "judge_model": "m", "judge_key": "JUDGE_API_KEY", **values}
    found = Settings(**given).problem()
    assert problem in found and "sk-123" not in found


def test_the_judge_needs_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_waiter(tmp_path, monkeypatch)
    run = make_run(tmp_path / "runs", LORA)
    values = {"judge_url": "https://judge.example.com", "judge_model": "m", "judge_key": "JUDGE_API_KEY", "examples": 7}
    with client(tmp_path / "runs") as http:
        route = f"/api/runs/{run.id}/evaluations"
        asked = http.post(route, json=values).json()
        question = asked["consent"]["question"]
        assert question == asked["error"] and not evaluation.find_all(run)
        assert question == (
            "Up to 14 requests, plus retries, go to https://judge.example.com/v1/chat/completions. Each has a prompt, "
            "its reference, and the outputs of base model and trained model. These texts leave this machine. The value "
            "of JUDGE_API_KEY is sent as API key. This needs your consent."
        )
        values["judge_agreed"] = asked["consent"]["judge_agreed"]
        other = http.post(route, json={**values, "judge_url": "https://other.example.com"})
        assert other.status_code == 409 and "consent" in other.json(), "for another address"
        assert http.post(route, json={**values, "judge_key": "OTHER_API_KEY"}).status_code == 409
        assert http.post(route, json=values).status_code == 201
        assert KEY not in json.dumps(http.get(route).json())
    (job,) = evaluation.find_all(run)
    assert not [path for path in job.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    command = ["evaluate", run.id, "--runs", str(tmp_path / "runs"), "--judge", "http://localhost:9/v1"]
    assert main([*command, "--judge-model", "m"]) == 2
    assert "To agree, add --send-outputs." in (told := capsys.readouterr().err) and "leave this machine" not in told
    several = ["evaluate", run.id, run.id, *command[2:], "--judge-model", "m", "--send-outputs"]
    assert main(several) == 2 and "Name one run, or leave out --judge" in capsys.readouterr().err
    assert main([*command[:-2], "--send-outputs"]) == 2 and "without --judge" in capsys.readouterr().err
    run.delete()


def test_a_judge_reads_what_the_template_is_given() -> None:
    user, system = {"role": "user", "content": "When?"}, {"role": "system", "content": "Be brief."}
    calls = [{"function": {"name": "clock"}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    assert plain_text([user], {}) == "When?"
    assert plain_text([system, user], {}) == "system: Be brief.\n\nuser: When?"
    text = plain_text([user, call], {"documents": [{"date": date(2026, 1, 2)}], "tools": []})
    assert text == f'documents: [{{"date": "2026-01-02"}}]\n\nuser: When?\n\nassistant: {json.dumps(calls)}'
