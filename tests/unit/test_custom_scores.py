"""Custom scores: a regular expression, or a function in a Python file, in a process of its own."""

import hashlib
import os
import time

import pytest

from backend.inference import custom_scores
from backend.models.evaluation import Settings
from backend.scoring.scorer import Regex, ScoreError, ScoreFile, Scorer, sha256_of
from backend.train.generation_eval import EvalPrompt
from backend.train.run_log import Stopped, TrainError


def nothing():
    pass


def write(folder, code):
    path = folder / "mine.py"
    path.write_text(code)
    return ScoreFile(str(path), hashlib.sha256(code.encode()).hexdigest())


@pytest.mark.parametrize(
    ("rule", "reference", "output", "expected"),
    [
        (Regex(r"\d+"), "", "There are 7.", 1),
        (Regex(r"\A\d+\Z"), "", "There are 7.", 0),
        (Regex(r"#### (\d+)", True), "So #### 7", "I say #### 7", 1),
        (Regex(r"#### (\d+)", True), "So #### 7", "I say #### 8", 0),
        (Regex(r"#### (\d+)", True), "So #### 7", "no number", 0),
        (Regex(r"#### (\d+)", True), "no number", "#### 7", None),
        (Regex(r"a|(b)", True), "a", "a", None),
    ],
)
def test_a_regular_expression(rule, reference, output, expected):
    with Scorer(rule, nothing) as scorer:
        assert scorer.score("", reference, output) == expected


FUNCTION = """\
import sys
print("loaded")  # does not disturb the protocol
def score(prompt, reference, output):
    print("called", sys.stdin.read())
    if output == "array":
        import numpy
        return numpy.float32(0.5)
    return {"none": None, "yes": True, "three": 3, "half": 0.5, "nan": float("nan"), "text": "x" * 90}[output]
"""


def test_a_score_file_returns_numbers(tmp_path):
    with Scorer(write(tmp_path, FUNCTION), nothing) as scorer:
        given = {"none": None, "yes": 1.0, "three": 3.0, "half": 0.5, "array": 0.5}
        assert {text: scorer.score("p", "r", text) for text in given} == given
        for text in ("nan", "text"):
            with pytest.raises(ScoreError, match=r"^returned .*, which is not a finite number, True, False or None$"):
                scorer.score("p", "r", text)
        with pytest.raises(ScoreError, match=r"^raised KeyError in line 8: 'other'$"):
            scorer.score("p", "r", "other")
        assert scorer.score("p", "r", "half") == 0.5, "an exception does not end the process"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def score(:", r"^raised SyntaxError in line 1: invalid syntax"),
        ("\nimport nowhere", r"^raised ModuleNotFoundError in line 2: No module named 'nowhere'$"),
        ("raise SystemExit", r"^raised SystemExit in line 1$"),
        ("import os\nos._exit(3)", r"^ended its process \(exit status 3\)$"),
        ("score = 1", r"^must define a function score\(prompt, reference, output\), with its"),
        ("def score(output, reference, prompt): pass", r"with its arguments in this order$"),
        ("def score(output): pass", r"^must define a function score\(prompt, reference, output\), with its"),
    ],
)
def test_files_that_cannot_be_loaded(tmp_path, code, problem):
    with pytest.raises(ScoreError, match=problem):
        Scorer(write(tmp_path, code), nothing)


def test_only_the_content_that_was_agreed_to_is_run(tmp_path):
    file = write(tmp_path, "def score(p, r, o): return 1")
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ScoreError, match="was changed after you agreed to run it"):
        Scorer(file, nothing)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ScoreError, match="does not exist on the server"):
        sha256_of(str(tmp_path / "nowhere"))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_call_that_does_not_return_is_ended(tmp_path):
    """Catastrophic backtracking of `re` takes hours and no signal interrupts it in its process."""
    with Scorer(Regex("(a+)+$"), nothing, seconds=0.5) as scorer:
        assert scorer.score("", "", "aaa") == 1
        with pytest.raises(ScoreError, match=r"^took longer than 0\.5 seconds$"):
            scorer.score("", "", "a" * 60 + "b")
    assert not is_alive(scorer._process.pid)

    def stop():
        if time.monotonic() > until:
            raise Stopped

    until = time.monotonic() + 60
    with pytest.raises(Stopped), Scorer(Regex("(a+)+$"), stop) as scorer:
        until = began = time.monotonic()
        scorer.score("", "", "a" * 60 + "b")
    assert time.monotonic() - began < 5 and not is_alive(scorer._process.pid)


PROMPT = EvalPrompt("<user>Q", "Q", "R", "Q")


def test_errors_name_the_example_and_the_model(tmp_path):
    file = write(tmp_path, "def score(p, r, o):\n    return {'R': 1, 'three': 3, 'none': None}[o]")
    settings = Settings(score_file=file.path, score_file_sha256=file.sha256)
    with custom_scores.running(settings, nothing, tmp_path) as (score,):
        assert score.of(1, PROMPT, {"base model": ["R"], "trained model": ["R", "R"]}) == [[1], [1, 1]]
        outputs = {"base model": ["R"], "trained model": ["three"]}
        with pytest.raises(TrainError) as error:
            score.of(4, PROMPT, outputs)
        assert str(error.value) == (
            f"The score file {file.path} returned 3, but scores of an evaluation are from 0 (worst) to 1 (best) "
            "(example 4, output of the trained model). The outputs are kept: evaluate again after the fix."
        )
        with pytest.raises(TrainError, match=r"raised KeyError in line 2: 'x' \(example 4, output of the base model\)"):
            score.of(4, PROMPT, {"base model": ["x"], "trained model": ["R"]})
        assert score.limits(1) == []
        assert score.of(5, PROMPT, {"base model": ["R", "none"], "trained model": ["R"]}) == [[None, None], [None]]
        assert "None for only some of the outputs of 1 example, so its score leaves it out" in score.limits(1)[0]


def test_a_score_without_examples_is_told(tmp_path):
    with custom_scores.running(Settings(regex="(x)", regex_group=True), nothing, tmp_path) as (score,):
        assert score.of(1, PROMPT, {"base model": ["x"], "trained model": ["x"]}) == [[None], [None]]
        (limit,) = score.limits(0)
        assert (
            limit
            == "The regular expression (x) does not match with a first group in any reference, so there is no score."
        )


def test_what_the_settings_refuse(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x")
    sha256 = hashlib.sha256(b"x").hexdigest()
    for values, problem in (
        ({"regex": "("}, "The regular expression ( is invalid: missing ), unterminated subpattern"),
        ({"regex": "x" * 1001}, "has 1,001 characters"),
        ({"regex": "x", "regex_group": True}, "The regular expression x has no group."),
        ({"regex_group": True}, "no effect without a regular expression"),
        ({"regex": "x", "examples": 0}, "has no effect without examples"),
        ({"score_file": str(tmp_path)}, "is not a file"),
        ({"score_file": str(path)}, f"so it needs your consent. Its SHA-256 is {sha256}."),
        ({"score_file": str(path), "score_file_sha256": "0" * 64}, f"Its SHA-256 is {sha256}."),
    ):
        assert problem in Settings(**values).problem(), values
    assert not Settings(score_file=str(path), score_file_sha256=sha256).problem()
