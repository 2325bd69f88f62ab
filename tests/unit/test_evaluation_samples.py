"""Several samples per prompt: pass@k, means, and outputs that depend on their seeds only."""

import itertools
from dataclasses import replace

import numpy
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig, LlamaConfig, LlamaForCausalLM

from backend.inference.example_scores import ExampleScores
from backend.inference.scores import pass_at_k
from backend.models import evaluation
from backend.models.evaluation import Settings
from backend.train.generation_eval import EvalPrompt, Generated, Generator
from backend.train.seeded_sampling import Sampling, SeededSampling

SAMPLED = Settings(samples_per_prompt=4, temperature=1.0, pass_at_k=2)


def test_pass_at_k_is_the_share_of_choices_with_a_right_sample():
    for count in range(1, 8):
        for right in itertools.product((False, True), repeat=count):
            for k in range(1, count + 1):
                choices = list(itertools.combinations(right, k))
                assert pass_at_k(right, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert pass_at_k([True] + [False] * 63, 64) == 1 and pass_at_k([False] * 64, 64) == 0


def test_pass_at_k_has_the_expected_value_of_k_draws():
    """A generator that is right in 30% of samples: the mean over prompts is the probability of k draws."""
    random = numpy.random.default_rng(0)
    estimates = [pass_at_k(list(random.random(10) < 0.3), 3) for _ in range(20_000)]
    assert numpy.mean(estimates) == pytest.approx(1 - 0.7**3, abs=0.01)


@pytest.mark.parametrize("together", [1, 2])
def test_greedy_outputs_have_no_penalty_of_the_model(together):
    """Its generation config may have one, which would count the padding of the shorter prompt, too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=2, **sizes))
    model.generation_config = GenerationConfig(repetition_penalty=1.5, eos_token_id=3)
    prompts = [[3, 4, 5], [6, 7, 8, 9]]
    tokenizer = _Digits()
    generator = Generator(tokenizer, None, together, 9, torch.float32, ends=frozenset())
    texts = [" ".join(map(str, ids)) for ids in prompts]
    batches = [texts[:1], texts[1:]] if together == 1 else [texts]
    outputs = [out.text for batch in batches for out in generator._batch(model, batch, lambda _: True, [])]
    for ids, output in zip(prompts, outputs, strict=True):
        assert output == " ".join(map(str, _most_likely(model, ids, 9)))
    assert model.generation_config.repetition_penalty == 1.5


class _Digits:
    """A tokenizer whose texts are the IDs of their tokens."""

    pad_token_id, eos_token_id = 3, 3

    def __call__(self, texts, **_):
        ids = [[int(each) for each in text.split()] for text in texts]
        longest = max(map(len, ids))
        padded = [[3] * (longest - len(each)) + each for each in ids]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in ids]
        return BatchEncoding({"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)})

    def batch_decode(self, rows, **_):
        return [" ".join(map(str, row.tolist())) for row in rows]


def _most_likely(model, ids, count):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


class CountedDigits:
    """A custom score: right or wrong, or a length."""

    name, label = "score_file", "Score of mine.py"

    def __init__(self, is_binary):
        self.is_binary = is_binary

    def of(self, number, prompt, outputs):
        return [
            [float(text == "7") if self.is_binary else len(text) / 10 for text in side] for side in outputs.values()
        ]


def rows(settings, scores):
    """Two examples; the base model is right once in four samples of the first one, the trained model three times."""
    prompt, right, wrong = EvalPrompt("Q", "Q", "7", "Q"), Generated("7", True), Generated("no", False)
    samples = [([right] + [wrong] * 3, [right] * 3 + [wrong]), ([wrong] * 4, [right] * 4)]
    sides = [{"base": base, "trained": trained} for base, trained in samples]
    found = [scores.row(n, prompt, outputs) for n, outputs in enumerate(sides, 1)]
    scores.add_pass_at_k(found)
    return found


def test_scores_are_means_and_examples_are_drawn():
    scores = ExampleScores(SAMPLED, ())
    first, second = rows(SAMPLED, scores)
    assert first["scores"]["exact_match"] == [0.25, 0.75] and second["scores"]["ends"] == [0, 1]
    assert first["scores"]["exact_match_pass_at_2"] == [1 - 3 / 6, 1]
    assert first["scores"]["exact_match_pass_at_4"] == [1, 1] and second["scores"]["exact_match_pass_at_4"] == [0, 1]
    assert first["base"] == "7" and [one["text"] for one in first["samples"]["trained"]] == ["7", "7", "7", "no"]
    assert [one["scores"]["numeric_answer"] for one in first["samples"]["base"]] == [1, 0, 0, 0]
    compared = {each.label: each for each in scores.compare([first, second])}
    exact = [label for label in compared if label.startswith("Exact match")]
    assert exact == ["Exact match, pass@1", "Exact match, pass@2", "Exact match, pass@4"]
    assert "chrF" in compared and not any("chrF, pass" in label or "stop token, pass" in label for label in compared)
    pair = compared["Exact match, pass@2"]
    assert (pair.base, pair.trained, pair.count) == (0.25, 1, 2), "an interval draws prompts, of which there are two"


@pytest.mark.parametrize("is_binary", [True, False])
def test_a_score_file_has_pass_at_k_if_it_says_right_or_wrong(is_binary):
    scores = ExampleScores(SAMPLED, (CountedDigits(is_binary),))
    found = scores.compare(rows(SAMPLED, scores))
    assert [each.label for each in found][: 1 + 2 * is_binary] == (
        ["Score of mine.py, pass@1", "Score of mine.py, pass@2", "Score of mine.py, pass@4"]
        if is_binary
        else ["Score of mine.py"]
    )


def test_one_sample_has_the_rows_of_earlier_versions():
    settings = Settings()
    scores = ExampleScores(settings, ())
    prompt = EvalPrompt("Q", "Q", "7", "Q")
    row = scores.row(1, prompt, {"base": [Generated("8", True)], "trained": [Generated("7", True)]})
    scores.add_pass_at_k([row])
    assert row["scores"]["exact_match"] == [0, 1] and "samples" not in row
    assert not any("pass" in each.name or "pass" in each.label for each in scores.compare([row]))


LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


PLAIN = Sampling(1.0)


def draw(seeds, sampling=PLAIN, tokens=1, prompt_tokens=3):
    """The tokens that are drawn for outputs with these seeds, outputs x tokens."""
    processor = SeededSampling(sampling, seeds, prompt_tokens, tokens)
    found = []
    for n in range(tokens):
        ids = torch.zeros((len(seeds), prompt_tokens + n), dtype=torch.long)
        found.append(processor(ids, LOGITS.repeat(len(seeds), 1)).argmax(-1))
    return torch.stack(found, dim=1)


def test_samples_have_the_distribution_of_temperature_and_top_p():
    for sampling, expected in (
        (PLAIN, [0.5, 0.3, 0.15, 0.05]),
        (Sampling(0.5), (LOGITS / 0.5).softmax(-1).tolist()),
        (Sampling(1.0, 0.75), [0.625, 0.375, 0, 0]),
    ):
        drawn = draw(range(4000), sampling).flatten()
        shares = torch.bincount(drawn, minlength=4) / len(drawn)
        assert shares.tolist() == pytest.approx(expected, abs=0.03)


def test_a_sample_depends_on_its_seed_only():
    """Not on the batch, the padding of the prompt, or what was drawn before."""
    together = draw([1, 2, 3], tokens=20)
    torch.rand(5)
    assert torch.equal(draw([3], tokens=20, prompt_tokens=9)[0], together[2])
    assert not torch.equal(together[0], together[1])


def test_more_samples_use_those_that_exist():
    assert evaluation._without_scores({**vars(SAMPLED)}) == evaluation._without_scores(
        vars(Settings(samples_per_prompt=9, temperature=1.0))
    )
    assert SAMPLED.ks == [2, 4] and Settings().ks == []


@pytest.mark.parametrize(("limit", "time"), [(100, "40 s"), (20, "40 s"), (200, "1 min 20 s")])
def test_the_time_before_the_start_counts_samples(limit, time):
    """Outputs that ended before an earlier limit take as long with a lower one."""
    offered = evaluation.Offer((None,), True, True, 100, "", "", 0, output_seconds=0.1, output_limit=100)
    settings = Settings(examples=50, max_new_tokens=limit, samples_per_prompt=4, temperature=1.0)
    assert evaluation.predict(offered, settings) == (
        f"Generating at most 400 outputs of both models takes at most about {time}, at the pace of the newest "
        "evaluation of this run."
    )
    few = replace(offered, validation_examples=7, kept_file="kept.jsonl", kept=3)
    for data, count in (("", 7), ("kept.jsonl", 3), ("other.jsonl", 50)):
        assert f"at most {count * 8} outputs" in evaluation.predict(few, replace(settings, data=data))
