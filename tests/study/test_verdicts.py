"""The papers' claims on the shipped tables, and their verdicts on answers by hand."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from fixture_types import Patch
from planned import CONF, plan, plan_of

from pipeline.config.stages import TableStage
from pipeline.errors import PipelineError
from pipeline.report.cells import cell_result, estimate_interval
from pipeline.report.claims import read_claims
from pipeline.report.contrasts import compared_pairs, mark_cells, measure_pairs
from pipeline.report.expression import evaluate, reduce_rows
from pipeline.report.frame import NoScore
from pipeline.report.load.answers import answers_of, sample_files
from pipeline.report.load.contents import CellResult
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.report.stored import StoredAnswers
from pipeline.report.verdicts import compare_sides, judge_claims, place_values
from pipeline.stats.contrast import contrast
from pipeline.stats.translations import metric_of
from pipeline.tables.plan import ScoreRef, TablePlan
from pipeline.tables.planned_runs import Planning

FILES = sorted((CONF / "claims").glob("*.yaml"))
CLAIMS = [
    claim for file in FILES for claim in read_claims(file.read_text(encoding="utf-8"), file.name)
]


class Made(StoredAnswers):
    """Answers by what a model is made of: `rates` of a run's name, logits.

    `experts` how far models of a run differ.
    """

    def __init__(
        self, of: TablePlan, rates: dict[str, float], experts: float = 0.0, n: int = 250
    ) -> None:
        super().__init__(
            Planning(TableStage(), of, problems=dict.fromkeys(of.scores, "no run here"))
        )
        self.plan, self.rates, self.experts, self.n = of, rates, experts, n
        self.kept: dict[ScoreRef, dict[int, float]] = {}

    def scores_by_question(
        self, score: ScoreRef, metric: str, pair: str | None
    ) -> dict[int, float]:
        if score not in self.kept:
            model = score.model
            if model in self.plan.chosen:
                model = next(iter(self.plan.chosen[model].models.values()))
            name = f"{model} {score.language}".encode()
            rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name).digest()[:8], "big"))
            level = self.rates.get(self.plan.specs[model].run, 0.0) + rng.normal(0, self.experts)
            hard = np.random.default_rng(1).normal(0, 1.5, self.n)
            right = rng.random(self.n) < 1 / (1 + np.exp(-(hard + level)))
            self.kept[score] = dict(enumerate(right.astype(float)))
        return self.kept[score]

    def number(self, score: ScoreRef, metric: str | None = None, pair: str | None = None) -> float:
        return 100 * fmean(list(self.scores_by_question(score, "", pair).values()))

    def read_translations(
        self, score: ScoreRef, pair: str | None
    ) -> dict[str, dict[int, tuple[str, str]]]:
        """Return the right words of ten words a sentence, for both directions if none is named."""
        right = self.scores_by_question(score, "", pair)
        words = " ".join(f"{letter}ex" for letter in "abcdefghij")
        texts = {doc: (words, words[: None if one else 15]) for doc, one in right.items()}
        return dict.fromkeys(
            [pair] if pair else [f"en-{score.language}", f"{score.language}-en"], texts
        )

    def groups_of(self, score: ScoreRef, pair: str | None) -> dict[int, int]:
        return {}  # no two questions share a passage


class Missing(Made):
    def scores_by_question(
        self, score: ScoreRef, metric: str, pair: str | None
    ) -> dict[int, float]:
        raise NoScore("eval-x is not made yet")


class Alike(Made):
    """Every answer right, or every one wrong."""

    def scores_by_question(
        self, score: ScoreRef, metric: str, pair: str | None
    ) -> dict[int, float]:
        return dict.fromkeys(range(self.n), self.rates["all"])


def verdicts(there: TablePlan, n: int = 250, **rates: float) -> dict[str, str]:
    answers: Any = Made(there, {name.replace("_", " "): rate for name, rate in rates.items()}, n=n)
    return {one.claim.id: one.verdict for one in judge_claims(there, answers)}


# --- names ---


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_every_name_of_a_claim_is_there(claim):
    found = PlacedClaim.of(claim, plan_of(claim.table))
    assert found.places and all(
        len(cells) == len(found.places) for cells in [*found.left, *found.right]
    )
    assert claim in claims_of(claim.table)


def test_a_choice_goes_by_what_it_compares_and_shows_the_other() -> None:
    rows = [np.array([0.2, 0.3]), np.array([0.5, 0.1])]  # what is compared, and what is shown
    assert reduce_rows("max", rows, 1)[1] == 0.1 and reduce_rows("min", rows, 1)[1] == 0.3
    assert reduce_rows("mean", rows, 1) == pytest.approx([0.35, 0.2])


def test_a_written_row_stands_for_its_rows():
    (claim,) = [one for one in CLAIMS if one.id == "ls_zones_bring_nothing"]
    placed = PlacedClaim.of(claim, plan_of(claim.table)).places
    assert placed == ["mgsm.sw", "mgsm.te", "mgsm.bn", "mgsm.ja"]  # not mgsm.en


# --- verdicts ---


def test_swaps_that_are_better_are_shown_to_be():
    rates = dict(base=-2, language=-1.5, math=-1.5, joint=-1, soup=-1, ties=-1, swap=2, swap_any=2)
    found = verdicts(plan_of("sandbox_layer_swapping"), **rates)
    assert set(found.values()) == {"shown"}, found


def test_swaps_that_are_worse_contradict_all_but_what_says_so():
    found = verdicts(
        plan_of("layer_swapping_table1"), base=2, language=2, math=2, soup=2, swap=-2, swap_any=-2
    )
    assert {name for name, word in found.items() if word == "shown"} == {"ls_ja_below_math"}
    alike = ("ls_soup_below_math", "ls_soup_above_language", "ls_low_resource_gain_most")
    assert [found.pop(name) for name in alike] == ["undecided"] * 3
    found.pop("ls_ja_below_math")
    assert (
        found.pop("ls_bn_best_model") == "cannot be tested"
    )  # the best of nine pairs against that of three experts
    assert set(found.values()) == {"contradicted"}, found


SEEDS = "defaults: [{0}]\nname: {0}\nevery: {{seed: [0, 1, 2]}}\n"


def test_no_effect_is_undecided_and_says_what_could_have_been_seen():
    there = plan(SEEDS.format("unreasonable_table3"))
    found = judge_claims(there, Made(there, {}))  # type: ignore[arg-type]
    assert [one.verdict for one in found].count("undecided") >= len(found) - 1
    assert all(0.5 < (one.detectable or 0) < 9 for one in found)


# --- trainings ---

UNREASONABLE = (
    "unreasonable_table2",
    "unreasonable_table3",
    "unreasonable_table_a1",
    "unreasonable_table_a2",
)


@pytest.mark.parametrize("table", UNREASONABLE)
def test_one_training_of_each_cannot_test_a_claim_about_trainings(table):
    """However far apart the answers are; what would test it is said, and does."""
    there = plan_of(table)
    found = judge_claims(there, Made(there, {"swap": 3, "math": -3, "math frozen": 2}))  # type: ignore[arg-type]
    assert {one.verdict for one in found} == {"cannot be tested"}
    assert all("every.seed=[0,1,2]" in one.detail and "GPU-hours" in one.detail for one in found)
    there = plan(SEEDS.format(table))
    found = judge_claims(there, Made(there, {"swap": 3, "math": -3, "math frozen": 2}))  # type: ignore[arg-type]
    assert "cannot be tested" not in {one.verdict for one in found}


def test_seeds_that_no_training_takes_are_refused():
    mine = "name: t\nruns: {base: {}}\nscore: {eval: mgsm_0shot, in: sw}\ncolumns: {base: base}\n"
    with pytest.raises(PipelineError, match=r"every: seed=\[1, 2\]: no training needs a seed"):
        plan(mine + "every: {seed: [1, 2], model: sandbox}\n")


def test_each_of_a_list_counts():
    """Simultaneous training is below mixing, swaps above it.

    The modular ways do not both beat it; then they do.
    """
    there, claim = plan(SEEDS.format("unreasonable_table3")), "ue_swap_best_in_swahili_and_telugu"
    assert verdicts(there, swap=1, simultaneous=-0.5)[claim] == "contradicted"
    assert verdicts(there, swap=1, simultaneous=1)[claim] == "shown"
    assert verdicts(there, swap=0, simultaneous=0)[claim] == "undecided"


def test_comparable_is_judged_of_math_and_of_language_apart():
    there = plan(SEEDS.format("unreasonable_table_a1"))
    claims = [f"ue_{of}_partial_is_comparable" for of in ("math", "language")]
    equal, lower = verdicts(there, n=1000), verdicts(there, n=1000, math_part=-0.6)
    assert [equal[claim] for claim in claims] == ["shown", "shown"]
    assert [lower[claim] for claim in claims] == ["contradicted", "shown"]


def test_treatments_and_their_contrasts():
    there = plan_of("unreasonable_friedman")
    found = verdicts(there, swap=1.2, swap_part=0.6, simultaneous=0.6)
    shown = [name for name, word in found.items() if word == "shown"]
    assert sorted(shown) == [f"ue_treatments_differ_{way}" for way in ("best", "full", "lora")]
    assert set(found.values()) == {"shown", "cannot be tested"}  # four models, the least p is 1/8
    apart = {one.claim.id: one for one in judge_claims(there, Made(there, {}))}  # type: ignore[arg-type]
    assert "p of 4 clusters is 1 by Holm over 18" in apart["ue_modular_above_baselines_full"].detail
    assert "by Holm over 2; " in apart["ue_freezing_does_not_help"].detail


def test_ranks_take_the_mean_of_what_is_chosen():
    """Three equal trainings give three draws.

    Their best is higher than one by choosing alone, their mean is not.
    """
    there = plan_of("unreasonable_friedman")
    made: Any = Made(there, {}, experts=0.3)
    (claim,) = [one for one in CLAIMS if one.id == "ue_treatments_differ_best"]
    found = PlacedClaim.of(claim, there)
    by_column = dict(
        zip(claim.left, [place_values(found, made, cells) for cells in found.left], strict=True)
    )
    for name, count in (("best.math_only", 2), ("best.layer_swapping", 6)):
        (item,) = there.cells[found.places[0], name].items
        scores = [score for reading in item.readings for score in reading.values()]
        each = [fmean(list(made.scores_by_question(score, "", None).values())) for score in scores]
        assert len(each) == count and by_column[name][0] == pytest.approx(fmean(each))


ALIKE = (
    "sandbox",
    "sandbox_full",
    "sandbox_layer_swapping",
    "unreasonable_friedman",
    "unreasonable_table_a1",
)


@pytest.mark.parametrize("table", ALIKE)
@pytest.mark.parametrize("n, right", [(1, 1.0), (10, 0.0)])
def test_all_right_or_all_wrong_decides_nothing(table, n, right):
    """Seeds, nine pairs, choices, treatments.

    No verdict, no interval without a width, the rule of three.
    """
    there = plan_of(table)
    answers: Any = Alike(there, {"all": right}, n=n)
    found = judge_claims(there, answers)
    assert {one.verdict for one in found} <= {"undecided", "not made", "cannot be tested"}, found
    assert n == 1 or "not made" not in {one.verdict for one in found}
    lines = [
        line for line in measure_pairs(there, answers, compared_pairs(there)) if not line["missing"]
    ]
    for low, high, detectable in [
        (one.low, one.high, one.detectable) for one in found if one.low is not None
    ] + [(line["low"], line["high"], line["detectable"]) for line in lines]:
        assert high - low > 35 and detectable >= min(100, 200 / n)


def test_nine_pairs_are_shown_with_their_wins():
    there = plan_of("layer_swapping_table1")
    made = Made(there, {"swap any": 1.0}, experts=0.1)
    (found,) = [one for one in judge_claims(there, made) if one.claim.id == "ls_bn_average"]  # type: ignore[arg-type]
    assert found.verdict == "shown" and found.low is not None and found.low > found.claim.threshold


# --- against the table ---


@pytest.mark.parametrize(
    "table", ["layer_swapping_table2", "unreasonable_table3", "sandbox_layer_swapping"]
)
def test_a_sides_value_is_the_cells(table):
    """What is drawn is what the table shows: means, maxima and choices as cells.value has them."""
    there = plan_of(table)
    made = Made(there, {"swap any": 0.5}, experts=0.2)

    def of(score: ScoreRef) -> np.ndarray:
        return np.array(
            [np.mean(list(made.scores_by_question(score, "exact_match", None).values()))]
        )

    for line in measure_pairs(there, made, compared_pairs(there)):  # type: ignore[arg-type]
        names = (line["left"], line["right"])
        columns = names[0] in there.columns
        keys = [(line["place"], name) if columns else (name, line["place"]) for name in names]
        wanted = [100 * evaluate(there, there.cells[key], of, of)[0] for key in keys]
        assert [line["left_value"], line["right_value"]] == pytest.approx(wanted), line


def test_a_contrast_by_hand():
    """Swap minus math expert of nine pairs.

    The mean over l less math m, with the experts' means as they are.
    """
    there = plan_of("layer_swapping_table1")
    made = Made(there, {}, experts=0.3)
    (claim,) = [one for one in CLAIMS if one.id == "ls_bn_average"]
    found = PlacedClaim.of(type(claim)(**{**vars(claim), "left": ("layer_swap_default",)}), there)
    compared = compare_sides(found, made, found.left[0], found.right[0])  # type: ignore[arg-type]

    def answers(column: str) -> dict[tuple, np.ndarray]:
        found = {}
        for item in there.cells["bn.avg", column].items:
            (score,) = item.readings[0].values()
            found[item.at["m"], item.at.get("l")] = np.array(
                list(made.scores_by_question(score, "", None).values())
            )
        return found

    swap, math = answers("layer_swap_default"), answers("math_expert")
    wanted = np.array([[swap[m, k] - math[m, None] for k in (1, 2, 3)] for m in (1, 2, 3)])
    assert np.allclose(compared.differences(), wanted)
    assert compared.contrast() == contrast(wanted)


def test_translations_have_contrasts_of_the_corpus_metric():
    """By hand: chrF++ of all sentences of each seed, and its mean over seeds.

    Seeds add their variance.
    """
    from sacrebleu.metrics import CHRF

    there = plan("defaults: [sandbox]\nname: sandbox\naxes: {seed: [0, 1, 2]}")
    made: Any = Made(there, {"layer swap": 1.0}, experts=0.2, n=40)
    (line,) = measure_pairs(there, made, {("layer swap", "soup", "qac: flores to"): 1})
    values = []
    for row in ("layer swap", "soup"):
        cell, scores = there.cells[row, "qac: flores to"], []
        for item in cell.items:
            (reading,) = item.readings
            texts = made.read_translations(next(iter(reading.values())), cell.pair)[
                "en-qac"
            ].values()
            scores.append(
                CHRF(word_order=2)
                .corpus_score([two[1] for two in texts], [[two[0] for two in texts]])
                .score
            )
        assert len(scores) == 3
        values.append(fmean(scores))
    assert [line["left_value"], line["right_value"]] == pytest.approx(values)
    assert line["difference"] == pytest.approx(values[0] - values[1])
    assert (
        line["over"] == "problems seed"
        and line["low"] < line["difference"] < line["high"]
        and line["n"] == 40
    )


def test_contrasts_resample_the_axes_that_give_trainings_their_seeds():
    def over(of: TablePlan) -> set[str]:
        return {line["over"] for line in measure_pairs(of, Made(of, {}, n=8), compared_pairs(of))}  # type: ignore[arg-type]

    there = plan_of("sandbox_full")
    two = plan("defaults: [sandbox_full]\nname: sandbox_full\naxes: {seed: [0, 1]}")
    assert over(two) == {"problems"}
    made = Made(there, {"layer swap": 1.0}, n=20)
    lines = measure_pairs(there, made, compared_pairs(there))  # type: ignore[arg-type]
    assert {line["over"] for line in lines} == {"problems seed"}
    assert {line["left"] for line in lines if line["right"] in there.rows} and len(lines) == 8 * 2
    one = plan_of("sandbox")
    assert over(one) == {"problems"}


# --- cells ---


def cell_of(there: TablePlan, made: Any, row: str, column: str) -> CellResult:
    return cell_result(made, there.cells[row, column])


def test_a_cell_of_a_best_configuration_is_its_split_half_estimate():
    """For each model the best of A, B and C on odd questions is scored on even ones.

    Then the halves change places.
    """
    there = plan_of("unreasonable_table3")
    made = Made(there, {}, experts=0.2)
    found = cell_of(there, made, "sw", "layer_swap_full")
    worth, maxima = [], []
    for item in there.cells["sw", "layer_swap_full"].items:
        (reading,) = item.readings
        answers = np.array(
            [list(made.scores_by_question(score, "", None).values()) for score in reading.values()]
        )
        odd, even = answers[:, 0::2].mean(axis=1), answers[:, 1::2].mean(axis=1)
        worth.append((even[odd.argmax()] + odd[even.argmax()]) / 2)
        maxima.append(answers.mean(axis=1).max())
    assert len(worth) == 4 and found.value == pytest.approx(100 * np.mean(worth))
    assert found.maximum == pytest.approx(100 * np.mean(maxima)) and found.maximum > found.value
    assert found.low < found.value < found.high
    single = cell_of(there, made, "sw", "base")
    assert single.maximum is None and single.low < single.value < single.high


@pytest.mark.parametrize("metric", ["chrf++", "bleu"])
def test_a_cell_of_translations_has_sacrebleus_bootstrap_interval(
    metric: str, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", "1")
    there = plan_of("sandbox")
    made: Any = Made(there, {}, n=120)
    cell = replace(there.cells["base", "qac: flores to"], metric=metric)
    texts = made.read_translations(next(iter(cell.items[0].readings[0].values())), cell.pair)[
        "en-qac"
    ].values()
    references, responses = zip(*texts, strict=True)
    theirs = metric_of(metric, "en-qac").corpus_score(responses, [references], n_bootstrap=1000)
    value, low, high = estimate_interval(made, cell)  # type: ignore[misc]
    assert value == pytest.approx(theirs.score)
    assert ((high - low) / 2) == pytest.approx(theirs._ci, rel=0.1) and (
        low + high
    ) / 2 == pytest.approx(value)


@pytest.mark.parametrize("n, right", [(1, 1.0), (1, 0.0), (10, 1.0)])
def test_a_cell_of_translations_that_are_alike_has_a_width(n: int, right: float) -> None:
    there = plan_of("sandbox")
    for row in ("base", "layer swap"):
        cell = there.cells[row, "qac: flores to"]
        found = estimate_interval(Alike(there, {"all": right}, n=n), cell)
        assert (
            found
            and found[0] == pytest.approx(100 if right else found[0])
            and found[2] - found[1] >= 100 / n
        )


# --- the best ---


class Seeds(Made):
    """The first questions right, as many as a row of sandbox_full has in each seed.

    The base has one number.
    """

    def __init__(self, there: TablePlan, right: dict[str, tuple[int, ...]], n: int = 100) -> None:
        super().__init__(there, {}, n=n)
        self.right = right

    def scores_by_question(
        self, score: ScoreRef, metric: str, pair: str | None
    ) -> dict[int, float]:
        (row,) = {
            row
            for row in self.right
            if row in score.model.removeprefix("best counts of ").partition(" l")[0]
        }
        *_, seed = ["0", *re.findall(r"seed=(\d)", score.model)]
        return {doc: float(doc < self.right[row][int(seed)]) for doc in range(self.n)}


def bold(
    there: TablePlan, right: dict[str, tuple[int, ...]], column: str = "qac: mgsm"
) -> list[str]:
    """Return the bold rows, if the swap is compared with each other row.

    `right` is the number of right answers of 100 in each seed.
    """
    task, pair = ("flores", "en-qac") if "flores" in column else ("mgsm", None)
    cells = [
        CellResult(row, column, fmean(each), task=task, pair=pair) for row, each in right.items()
    ]
    alone = replace(there, table=replace(there.table, primary=()))
    pairs = {("layer swap", rival, column): 1 for rival in right if rival != "layer swap"}
    made: Any = Seeds(alone, right)
    marked = mark_cells(cells, measure_pairs(alone, made, pairs), {})
    return [cell.row for cell in marked if cell.best]


def test_one_lucky_seed_of_three_is_not_best():
    """45 of 100 questions more in one of three seeds.

    Significant over questions, not over seeds; in each of three it is, and against one model that
    serves all seeds likewise. Two seeds are compared by their means.
    """
    there = plan_of("sandbox_full")
    half, lucky = (50, 50, 50), (95, 50, 50)
    for rival, numbers in (("soup", half), ("base", (50,))):
        assert bold(there, {"layer swap": lucky, rival: numbers}) == []
        assert bold(there, {"layer swap": (95, 95, 95), rival: numbers}) == ["layer swap"]
    two = plan("defaults: [sandbox_full]\nname: sandbox_full\naxes: {seed: [0, 1]}")
    assert bold(two, {"layer swap": lucky[:2], "soup": half[:2]}) == ["layer swap"]


def test_a_best_cell_is_above_all_that_it_is_compared_with():
    there = plan_of("sandbox")
    right = {"layer swap": (90,), "soup": (50,), "TIES": (88,)}
    assert bold(there, right) == []  # two questions above TIES
    assert bold(there, {row: right[row] for row in ("layer swap", "soup")}) == ["layer swap"]
    assert bold(there, {"layer swap": (20,), "soup": (50,)}) == ["soup"]
    assert bold(there, {"layer swap": (90,)}) == []  # nothing to be above


def test_a_best_cell_is_corrected_over_all_comparisons():
    """Six questions of 100 more, and none less: p = 0.014 by Tango's score test against one rival.

    Against four, of which it is as far above each, Holm's p is 0.057.
    """
    there = plan_of("sandbox")
    rivals = dict.fromkeys(("soup", "TIES", "base", "math expert"), (50,))
    assert bold(there, {"layer swap": (56,), "soup": (50,)}) == ["layer swap"]
    assert bold(there, {"layer swap": (56,), **rivals}) == []


@pytest.mark.parametrize("right, best", [(52, []), (95, ["layer swap"])])
def test_translations_are_best_where_their_metric_is_significantly_higher(
    right: int, best: list[str]
):
    there = plan_of("sandbox")
    assert bold(there, {"layer swap": (right,), "soup": (50,)}, "qac: flores to") == best


# --- files ---


def question_scores(path: Path, metric: str) -> dict[Any, float]:
    ((place, samples),) = sample_files(path.parents[1])
    return answers_of(place, samples).by_question(metric)


def line_of(doc: int, right: float, response: str = "42") -> str:
    scores = {"exact_match": right, "numeric_match": 1.0}
    kept = {"doc_id": doc, "prompt": "q" * 5000, "response": response, "scores": scores}
    return json.dumps(kept, ensure_ascii=False) + "\n"


def test_answers_are_read_whatever_they_hold(tmp_path: Path):
    hostile = 'no "scores": {"exact_match": 9}}\n'
    path = tmp_path / "run/samples/mgsm.sw.jsonl"
    path.parent.mkdir(parents=True)
    odd = json.dumps({"scores": {"exact_match": 0.0}, "doc_id": 2})  # keys in another order
    path.write_text(line_of(0, 1.0, hostile) + line_of(1, 0.0) + odd + "\n", encoding="utf-8")
    assert question_scores(path, "exact_match") == {0: 1.0, 1: 0.0, 2: 0.0}


def test_parts_of_a_question_are_summed(tmp_path: Path):
    """The bits of mgsm_steps are stored with their question.

    7 has two steps, one of them in keys of another order.
    """
    path = tmp_path / "run/samples/mgsm_steps.sw.jsonl"
    path.parent.mkdir(parents=True)
    scores = [(0, 7, -1.5), (1, 7, -2.0), (2, 9, -4.0)]
    lines = [
        {"doc_id": doc, "scores": {"acc": 1.0, "bits": [question, bits]}}
        for doc, question, bits in scores
    ]
    lines[1] = dict(reversed(lines[1].items()))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert question_scores(path, "bits") == {7: -3.5, 9: -4.0}
    assert question_scores(path, "acc") == {0: 1.0, 1: 1.0, 2: 1.0}
