"""stage=search: interrupted anywhere it is the same search; better than a grid of as many points; what is refused."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_types import Patch

from pipeline.config.compose import compose
from pipeline.config.evaluation import Eval, Measure
from pipeline.errors import PipelineError
from pipeline.extras import optuna_study as study
from pipeline.extras import search
from pipeline.extras.optuna_study import (
    Invalid,
    Trial,
    front,
    is_worse,
    paired_difference,
    read_space,
    run_study,
    sampler_of,
)
from pipeline.report.sweep import scores_in

pytest.importorskip("optuna")

RANGE = {"low": 0.0, "high": 1.0}
SPACE = read_space({"x": RANGE, "y": RANGE, "z": RANGE, "way": [[1, 2], "b"]}, ["x", "y", "z", "way"], "ties")
QUESTIONS = 200


def right_answers(point: dict[str, Any], count: int) -> list[float]:
    """Made-up answers: harder questions need a better configuration; each question also favours places at random."""
    distance = (point["x"] - 0.62) ** 2 + (point["y"] - 0.31) ** 2 + (point["z"] - 0.87) ** 2
    quality = 0.9 - 1.2 * distance - (0.1 if point["way"] == "b" else 0)
    return [100.0 * (random.Random(question).random() < quality) for question in range(count)]


def one_score(point: dict[str, Any], questions: int | None) -> list[list[list[float]]]:
    return [[right_answers(point, questions or QUESTIONS)]]


def two_scores(point: dict[str, Any], questions: int | None) -> list[list[list[float]]]:
    other = {**point, "x": 1 - point["x"]}
    return [[right_answers(point, QUESTIONS)], [right_answers(other, QUESTIONS)]]


def searched(trials: int, evaluate=one_score, name: str = "tpe", sets=(None,), seed: int = 0) -> list[Trial]:
    return run_study(SPACE, evaluate, trials, sampler_of(name, seed, 6), 2 if name == "nsga2" else 1, sets)


@pytest.mark.parametrize(
    ("evaluate", "name", "sets"),
    [(one_score, "tpe", (20, None)), (two_scores, "nsga2", (None,)), (one_score, "random", (None,))],
)
def test_begun_again_for_more_trials_it_goes_on(evaluate, name, sets) -> None:
    """As a search does that was interrupted: its first trials are the same. Another seed is another search."""
    whole = searched(30, evaluate, name, sets)
    for count in (3, 14):
        assert searched(count, evaluate, name, sets) == whole[:count]
    assert searched(5, evaluate, name, sets, seed=1) != whole[:5]


def test_against_a_grid_of_the_same_budget() -> None:
    """Three ranges and a choice: 40 trials come nearer to the maximum than a grid of 54, for most seeds."""

    def value(point: dict[str, Any]) -> float:
        return study.mean_score(one_score(point, None)[0])

    levels = (0.0, 0.5, 1.0)
    best_of_grid = max(
        value({"x": x, "y": y, "z": z, "way": way}) for x in levels for y in levels for z in levels for way in "ab"
    )
    best = [max(trial.values[0] for trial in searched(40, seed=seed)) for seed in range(4)]
    assert sum(found > best_of_grid for found in best) >= 3, (best, best_of_grid)


def test_paired_stopping_spares_questions_and_finds_as_much() -> None:
    plain, stopped = searched(30), searched(30, sets=(20, 60, None))
    used = [trial.questions or QUESTIONS for trial in stopped]
    assert any(trial.stopped for trial in stopped) and not any(trial.stopped for trial in plain)
    assert sum(used) < 0.8 * QUESTIONS * 30
    best = [max(trial.values[0] for trial in found if not trial.stopped) for found in (plain, stopped)]
    assert best[1] >= best[0] - 5


def test_paired_differences_by_hand() -> None:
    """Two tasks: differences 100, 0 and 0, 0: means 50 and 0; variances 5000 / 2 and 0, over 2 squared."""
    left, right = [[100.0, 0.0], [0.0, 100.0]], [[0.0, 0.0], [0.0, 100.0]]
    assert paired_difference(left, right) == (25.0, pytest.approx(math.sqrt(5000 / 2) / 2))
    assert is_worse(right, left, 0.9) and not is_worse(right, left, 1.1) and not is_worse(left, right, 0.1)
    assert paired_difference([[1.0]], [[0.0]]) == (1.0, math.inf) and not is_worse([[0.0]], [[1.0]], 2.0)
    assert is_worse([[0.0] * 5], [[100.0] * 5], 2.0)  # worse on each: no spread, and no doubt


def test_trials_that_ended_early_are_counted_without_those_that_are_no_merge() -> None:
    ends = [((5.0, 1.0), False, ""), ((1.0, 0.0), True, ""), ((), True, "8 layers"), ((2.0, 1.0), True, "")]
    trials = [Trial({"x": x}, values, None, *end) for x, (values, *end) in enumerate(ends)]
    settings = {"search": SimpleNamespace(split="dev", objectives=[Measure("a")] * 2), "eval": Eval(tasks=[])}
    found = search.Outcome(SimpleNamespace(**settings), {}, [*trials, trials[0]], None, [])  # type: ignore[arg-type]
    first, *more = found.describe_search()
    assert first == "5 trials of 4 configurations, 2 of them ended early."
    assert more[0] == "1 of them were no valid merge: 8 layers"


def test_the_front_by_hand() -> None:
    trials = [Trial({"x": x}, values, None, stopped) for x, values, stopped in [
        (1, (3.0, 1.0), False), (2, (2.0, 2.0), False), (3, (2.0, 1.0), False), (4, (9.0, 9.0), True),
        (1, (3.0, 1.0), False), (5, (2.0, 2.0), False),
    ]]  # fmt: skip
    finished = search.Outcome(SimpleNamespace(), {}, trials, None, []).finished  # type: ignore[arg-type]
    assert [trial.point["x"] for trial in finished] == [1, 2, 3, 5]  # each configuration once
    assert [trial.point["x"] for trial in front(finished)] == [1, 2, 5]


def test_ranges_and_lists_are_drawn_as_they_are_given() -> None:
    """Whole numbers between whole ends, decimals else, both ends included; a list's values as they were, lists too."""
    space = {"a": {"low": 2, "high": 4}, "b": {"low": 0.01, "high": 1, "log": True}, "c": [[1, 2], "x", 1.5, None]}
    points: list[dict[str, Any]] = []

    def noting(point: dict[str, Any], questions: int | None) -> list[list[list[float]]]:
        points.append(point)
        return [[[0.0]]]

    run_study(read_space(space, list(space), "ties"), noting, 60, sampler_of("random", 0, 6))
    assert {repr(point["a"]) for point in points} == {"2", "3", "4"}
    assert {repr(point["c"]) for point in points} == {"[1, 2]", "'x'", "1.5", "None"}
    drawn = [point["b"] for point in points]
    assert all(0.01 <= value <= 1 for value in drawn)
    assert 15 < sum(value < 0.1 for value in drawn) < 45  # as often below a tenth as above


def test_configurations_that_are_no_merge_count_as_trials() -> None:
    def partly(point, questions):
        if point["x"] > 0.5:
            raise Invalid("there are 8 layers")
        return one_score(point, questions)

    found = searched(14, partly)
    invalid = [trial for trial in found if trial.reason]
    assert invalid and all(trial.values == () and trial.point["x"] > 0.5 for trial in invalid)
    assert all(trial.values for trial in found if trial.point["x"] <= 0.5)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"scales": [1, 2]}, "search.space.scales: merge=ties has no such knob; it has scale, weights"),
        ([1, 2], "give search.space={knob"),
        ({"scale": {"low": 1, "high": 1}}, "is an empty range: give low below high"),
        ({"scale": {"low": 0, "high": 1, "log": True}}, "is an empty range: give low above 0 for log"),
        ({"scale": {"low": 0, "high": 1, "step": 2}}, "a range is {low: 0, high: 1}"),
        ({"scale": [1, 1]}, "give different values"),
        ({"scale": [1]}, "holds one configuration: give a knob two values"),
    ],
)
def test_spaces_without_room(space: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words.replace("{", r"\{").replace("}", r"\}")):
        read_space(space, ["scale", "weights"], "ties")


START = ["stage=search", "merge=ties", "merge.experts=[a,b]", "eval=layer_swapping", "languages=[en,sw]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["search.objectives=[{task:held_out}]"], "scores mgsm.*not held_out"),
        (["search.objectives=[{task:mgsm,language:te}]"], "te is not in languages=.*: add it"),
        (["search.objectives=[{task:mgsm},{task:mgsm},{task:mgsm}]"], "names 3 scores: give one or two"),
        (["search.questions=[50,20]"], "give growing numbers"),
        (["search.objectives=[{task:mgsm,language:en},{task:mgsm,language:sw}]", "search.questions=[9,20]"], "one s"),
        (["eval.split=dev"], "eval.split=dev: leave it out, search.split says"),
    ],
)
def test_settings_that_are_refused(words: list[str], message: str) -> None:
    space = [] if "space" in words[0] else ["search.space={density:{low:0.1,high:0.9}}"]
    config: Any = compose([*START, *space, *words])
    with pytest.raises(PipelineError, match=message):
        search.check_settings(config)


# ---------------------------------------------------------------------------------------------------- small world


@pytest.fixture
def words(math_expert: Path, language_expert: Path, world: Path, runs_dir: Path) -> list[str]:
    asked = ["eval=mgsm_0shot", "eval.max_gen_toks=4", "eval.limit=4", f"data_root={world}"]
    experts = ["merge=task_arithmetic", f"merge.experts=[{math_expert},{language_expert}]"]
    return ["stage=search", *experts, *asked, f"runs_dir={runs_dir}", "tracking.mode=disabled"]


def test_a_search_of_a_merge(call, words: list[str], runs_dir: Path, monkeypatch: Patch) -> None:
    """Development questions choose, test questions report; a second call with more trials continues, and computes no
    evaluation again."""
    space = ["search.space={scale:{low:0.2,high:1.5},weights:[[1,1],[1,0.5]]}", "search.questions=[2,4]"]
    words = [*words, "languages=[qac]"]
    first = call(*words, *space, "search.trials=3", status=0)
    page = Path(first.out.strip())
    found = json.loads((page.parent / "search.json").read_text())
    assert found["trials"] == 3 and "trials of" in found["sentences"][0]
    assert [row["way"] for row in found["results"]] == ["given", "search"]
    assert found["results"][0]["point"] == {} and found["results"][0]["beyond_given"] == [
        {"difference": 0.0, "error": 0.0, "interval": pytest.approx(found["results"][0]["beyond_given"][0]["interval"])}
    ]
    lines = (page.parent / "trials.csv").read_text().splitlines()
    assert lines[0].startswith("trial,scale,weights,score,questions,ended") and len(lines) == 4
    assert "What was chosen" in page.read_text()
    settings = [
        json.loads(path.read_text())["decided_by"]["config"] for path in runs_dir.glob("eval-mgsm*/manifest.json")
    ]
    splits = {(one["eval"].get("split", "test"), one["eval"].get("limit")) for one in settings}
    assert {("dev", 4), ("test", 4)} <= splits
    before = set(runs_dir.glob("eval-mgsm*"))
    again = call(*words, *space, "search.trials=3")
    assert again.status == 0 and again.out == first.out and set(runs_dir.glob("eval-mgsm*")) == before
    more = call(*words, *space, "search.trials=4")
    assert more.status == 0 and (page.parent / "trials.csv").read_text().splitlines()[:4] == lines


def test_questions_without_a_development_half(call, words: list[str]) -> None:
    done = call(*words, "languages=[qac]", "search.space={scale:[0.5,1.0]}", "search.trials=2", "search.split=test")
    assert done.status == 0 and "The test questions chose: the split-half score alone" in done.err, done.err
    found = json.loads((Path(done.out.strip()).parent / "search.json").read_text())
    assert all(row["choosing"] == row["test"] for row in found["results"])


def test_two_objectives_give_a_front(call, words: list[str]) -> None:
    both = [
        "languages=[qac,en]",
        "search.objectives=[{task:mgsm,language:qac},{task:mgsm,language:en}]",
        "search.space={scale:[0.5,1.0,1.5]}",
    ]
    done = call(*words, *both, "search.trials=3", status=0)
    found = json.loads((Path(done.out.strip()).parent / "search.json").read_text())
    chosen = [row for row in found["results"] if row["way"] == "search"]
    assert chosen and all(len(row["choosing"]) == len(row["test"]) == 2 for row in chosen)


def test_steps_of_a_question_are_one_score(tmp_path: Path) -> None:
    """By hand: steps right of 2 of 2, 0 of 1, 1 of 3: 50 % of six; shares 50 + (200 - 100) / 2 and so on."""
    steps = [(0, 1.0), (0, 1.0), (1, 0.0), (2, 1.0), (2, 0.0), (2, 0.0)]
    lines = [{"doc_id": number, "correct": bool(one[1]), "scores": {"acc": one}} for number, one in enumerate(steps)]
    file = tmp_path / "samples/mgsm_steps.sw.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {
        **{"task": "mgsm_steps", "language": "sw", "pair": None, "subject": None, "num_fewshot": 0, "metric": "acc"},
        **{"filter": "none", "value": 0.5, "stderr": None, "n": 3},
    }
    (tmp_path / "scores.json").write_text(json.dumps({"rows": [row]}))
    assert list(scores_in(tmp_path).values()) == [[100.0, 25.0, 25.0]]
    (tmp_path / "scores.json").write_text(json.dumps({"rows": [row | {"value": 0.31}]}))
    with pytest.raises(PipelineError, match="acc of mgsm_steps is of all answers together, not of each"):
        scores_in(tmp_path)
