"""Sampled answers.

Their distribution, that they depend on nothing but the question, and their scores by hand.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import Notes, Scripted, asked, choice, none_stored, run_of
from scipy.stats import chisquare
from test_decode import lookup_table, run
from test_score import number_of, value

from pipeline.errors import PipelineError
from pipeline.evaluate import metrics, records
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.score import score_tasks, split_thoughts
from pipeline.evaluate.stage import make
from pipeline.evaluate.steps import Sampling
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.lock import Lock
from pipeline.stages.evaluation import refuse_sampling

# --- draws ---


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (1.0, 0.001)]
)
def test_tokens_have_the_probabilities_of_the_tempered_distribution(
    temperature: float, top_p: float
) -> None:
    """4,000 draws against softmax(logits / temperature), cut at top_p."""
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0, -3.0])
    weights = [math.exp(float(logit) / temperature) for logit in logits]
    shares = sorted(
        ((weight / sum(weights), token) for token, weight in enumerate(weights)), reverse=True
    )
    kept: dict[int, float] = {}
    for share, token in shares:
        if sum(kept.values()) < top_p:
            kept[token] = share
    sampling = Sampling(temperature, top_p, [f"question {n}" for n in range(400)])
    numbers = [sampling.number(place, position) for place in range(400) for position in range(10)]
    drawn = Counter(sampling.choose(logits.expand(4000, 5), torch.tensor(numbers)).tolist())
    assert drawn.keys() <= kept.keys()
    observed = [drawn[token] for token in kept]
    expected = [4000 * share / sum(kept.values()) for share in kept.values()]
    assert len(kept) == 1 or chisquare(observed, expected).pvalue > 1e-4


def noisy(following: list[int], scale: float = 1.0) -> Any:
    """Return the table's model in float64, with chances for all other tokens."""
    model = lookup_table(following).double()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        model.lm_head.weight += scale * torch.randn_like(model.lm_head.weight)
    return model


def test_slots_change_no_sample() -> None:
    model, rests = noisy([*range(1, 20), 0]), [[3, 15], [3, 5, 9], [3, 18], [3, 19], [4]]
    sampling = Sampling(1.0, 0.9, [f"q{place}" for place in range(5)])
    plain, *_ = run(model, [1, 2], rests, slots=8, room=12, sampling=sampling)
    assert len({tuple(answer) for answer in plain.values()}) > 2
    for slots in (1, 2, 3):
        assert run(model, [1, 2], rests, slots=slots, room=12, sampling=sampling)[0] == plain
    again = Sampling(1.0, 0.9, [f"q{place}, another answer" for place in range(5)])
    assert run(model, [1, 2], rests, slots=8, room=12, sampling=again)[0] != plain
    greedy = run(model, [1, 2], rests, slots=8, room=12)[0]
    assert (
        run(model, [1, 2], rests, slots=8, room=12, sampling=Sampling(1e-4, 1.0, sampling.keys))[0]
        == greedy
    )


# --- scores ---


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    assert [metrics.pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert metrics.pass_at_k(5, 2, 2) == pytest.approx(0.7)  # 3 of 10 pairs are wrong
    assert metrics.pass_at_k(3, 0, 3) == 0


def test_the_majority_is_of_answers_that_hold_a_number() -> None:
    assert metrics.majority([metrics.INVALID, metrics.INVALID, "7", "8", "8"]) == [3, 4]
    assert metrics.majority(["7", "8"]) == [0]
    assert metrics.majority([metrics.INVALID] * 2) == [0, 1]


def test_a_number_has_one_vote_however_it_is_written() -> None:
    """As the harness' filter extracts it, with the full stop of its sentence."""
    assert metrics.majority(["18", "18", "1800", "1,800", "1,800."]) == [2, 3, 4]
    assert metrics.majority(["7", "7", "$12", "12.00", "-12", "12."]) == [2, 3, 5]
    assert metrics.majority(["3, 5", "5", "A 5", "3, 5"]) == [0, 3]  # no number


class Drawn(Scripted):
    """Answers by question and by the number of the answer."""

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        settings = [request.args[1] for request in requests]
        assert all(
            (one["do_sample"], one["temperature"], one["top_p"]) == (True, 0.7, 0.9)
            for one in settings
        )
        assert {one["draw"].split()[0] for one in settings} == {"5"}
        answers = []
        for request in requests:
            answers.append(
                answer_of(number_of(request.args[0]), int(request.args[1]["draw"].split()[1]))
            )
            self.ended("generate_until", request.args, (answers[-1], None))
        return answers


def answer_of(question: int, answer: int) -> str:
    """Question 0: right, wrong, right, none. 1: 77, 77, right, right. 2: none at all.

    Others: right.
    """
    right, unended = f" The answer is {10 + question}.", f" The answer is {10 + question}"
    wrong = " The answer is 77."
    return {
        0: [unended, wrong, right, " No."],
        1: [wrong, wrong, right, right],
        2: [" No."] * 4,
    }.get(question, [right] * 4)[answer]


def test_scores_of_four_answers_by_hand(data_root: Path, tmp_path: Path) -> None:
    task = asked("mgsm", 2)
    definitions = task_specs(choice(task), ["en"], data_root, tmp_path / "tasks")
    settings = choice(task, limit=4, temperature=0.7, top_p=0.9, answers=4, sample_seed=5)
    scores = score_tasks(
        Drawn(), definitions, load_tasks(definitions, Lock()), settings, none_stored(tmp_path)
    )
    each = [0.5, 0.5, 0.0, 1.0]
    first = scores.rows[0]
    assert (first.metric, first.filter, first.value, first.n) == (
        "exact_match",
        "flexible-extract",
        0.5,
        4,
    )
    assert first.stderr == pytest.approx((sum((one - 0.5) ** 2 for one in each) / 3 / 4) ** 0.5)
    assert value(scores, "exact_match", filter="strict-match") == 0.5
    assert value(scores, "majority") == 0.5  # 0 by two of three; 1 not, as 77 comes first; 3
    assert value(scores, "pass@1") == 0.5
    assert value(scores, "pass@2") == pytest.approx((5 / 6 + 5 / 6 + 0 + 1) / 4)
    assert value(scores, "pass@4") == 0.75
    assert value(scores, "unparsed") == pytest.approx((0.25 + 0 + 1 + 0) / 4)
    (samples,) = scores.samples.values()
    assert [sample["scores"]["exact_match"] for sample in samples] == each
    assert [sample["correct"] for sample in samples] == [True, False, False, True]
    assert [answer["extracted"] for answer in samples[1]["answers"]] == ["77.", "77.", "11.", "11."]
    further = records.further_rows_of(definitions, scores.samples, None)
    assert [row.value for row in further if row.metric == "numeric_match"] == [0.5]
    assert [row.n for row in further if row.metric == "other_language"] == [11]


def test_an_evaluation_is_sampled_and_found_again(
    data_root: Path, tmp_path: Path, tiny: Path
) -> None:
    """Another batch size, order and sharing give the same answers; another seed others."""
    import json

    def answers(name: str, **knobs: Any) -> list[list[str]]:
        how = {
            "temperature": 1.5,
            "answers": 2,
            "max_gen_toks": 12,
            "dtype": "float32",
            "languages": ["en"],
        } | knobs
        run = run_of(tmp_path / name, tiny, data_root, asked("mgsm", 2), **how)
        (tmp_path / name / "work").mkdir(parents=True)
        make(run, tmp_path / name / "work", Notes())  # type: ignore[arg-type]
        lines = (tmp_path / name / "work/samples/mgsm.en.jsonl").read_text().splitlines()
        return [[answer["response"] for answer in json.loads(line)["answers"]] for line in lines]

    first = answers("a", batch_size=3)
    assert len(first) == 10 and all(len(each) == 2 for each in first)
    assert any(each[0] != each[1] for each in first)
    assert answers("b", batch_size=8, share_prefix=False) == first
    assert [each[0] for each in answers("c", answers=3)[:10]] == [each[0] for each in first]
    assert answers("d", sample_seed=1) != first
    stored = list((tmp_path / "a/runs/.scores").glob("*.jsonl"))
    assert (
        len(stored) == 1
        and len([line for line in stored[0].read_text().splitlines() if line]) == 20
    )


def test_thoughts_are_no_part_of_the_answer(tmp_path: Path) -> None:
    """The harness' own cut of the same text, and the language of the thoughts as a score."""
    from lm_eval.models.utils import postprocess_generated_text

    for text in (
        "six and four</think>\n The answer is 10.",
        "a</think>b</think> 7",
        "no end at all",
        "</think>7",
    ):
        assert split_thoughts(text, "</think>")[1] == postprocess_generated_text(
            text, [], "</think>"
        )
    assert split_thoughts("</think>7", "</think>")[0] == "" and split_thoughts(" 7 ", None) == (
        None,
        " 7 ",
    )
    definitions = task_specs(choice(asked("mgsm", 0)), ["te"], None, tmp_path / "tasks")
    samples = [
        {"response": "పది", "thinking": thought, "number": "10", "scores": {"numeric_match": True}}
        for thought in ("six and four make ten in all", "ఆరు నాలుగు కలిపితే పది అవుతుంది")
    ]
    (row,) = [
        row
        for row in records.language_rows(definitions[0], samples)
        if row.metric.startswith("thinking")
    ]
    assert (row.metric, row.value, row.n) == ("thinking_other_language", 0.5, 2)


# --- refusals ---


@pytest.mark.parametrize(
    ("task", "knobs", "why"),
    [
        (
            "mgsm",
            {"answers": 4},
            "eval.answers=4 is only read with eval.temperature above 0. Set eval.temp",
        ),
        ("mgsm", {"top_p": 0.9}, "eval.top_p=0.9 is only read with eval.temperature above 0"),
        (
            "belebele",
            {"temperature": 0.7},
            "eval.temperature=0.7 is only read by tasks with written answers",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(task: str, knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(PipelineError, match=why):
        refuse_sampling(choice(asked(task, 0), **knobs))
