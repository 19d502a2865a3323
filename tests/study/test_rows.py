"""The format of a table: what small tables expand to, worked out by hand.

And what is no table, or says something that does nothing: one sentence with file and row.
"""

from typing import Any

import numpy as np
import pytest
from planned import READS, canonical, plan, shipped

from pipeline.errors import PipelineError
from pipeline.report.expression import evaluate, is_open_choice
from pipeline.tables.expand import expand_table
from pipeline.tables.plan import ScoreRef, ScoreWords
from pipeline.tables.reader import read_table
from pipeline.tables.run_specs import Ref

TABLE = """
name: small
axes:
  language: [sw, te]
  m: [1, 2]
  l: [1, 2]
  b: [3, 5]
every: {model: base_model, mixture: small, eval.dtype: float32}
runs:
  base: {}
  math: {stage: sft, expert: math, recipe: "math_{m}", seed: "{m}"}
  language: {stage: sft, expert: "{language}", seed: "{l}"}
  swap: {merge: layer_swap, merge.math: math, merge.language: language, merge.bottom_layers: "{b}"}
  unused: {stage: sft, expert: math, seed: 9}
score: {eval: mgsm_2shot, in: "{language}"}
columns:
  base: base
  math: math
  best: {run: swap, best: [b]}
rows:
  "{language}.avg": {mean: [m, l]}
"""


def changed(old: str, new: str) -> str:
    assert old in TABLE
    return TABLE.replace(old, new)


def refused(text: str, **every: Any) -> str:
    with pytest.raises(PipelineError) as caught:
        plan(text, **every)
    message = str(caught.value)
    assert message.startswith("mine.yaml") and "\n" not in message
    return message


def scored(model: str, language: str) -> ScoreRef:
    return ScoreRef(model, ScoreWords({"eval": "mgsm_2shot", "eval.dtype": "float32"}), language)


def test_a_run_is_made_for_each_value_of_the_axes_that_it_names() -> None:
    found = plan(TABLE).specs
    assert {key for key in found if key.startswith("math")} == {"math m=1", "math m=2"}
    assert (
        sum(key.startswith("swap") for key in found) == 2 * 2 * 2 * 2
    )  # language and m, l through its experts, b
    one = found["swap language=te m=1 l=2 b=5"]
    assert one.kind == "merge" and one.words == {
        "merge": "layer_swap",
        "merge.math": Ref("math m=1"),
        "merge.language": Ref("language language=te l=2"),
        "merge.bottom_layers": 5,
    }


def test_every_reaches_the_runs_whose_stage_reads_it() -> None:
    found = plan(TABLE).specs
    assert found["base"].kind == "base" and found["base"].words == {"model": "base_model"}
    math = {
        "model": "base_model",
        "mixture": "small",
        "stage": "sft",
        "expert": "math",
        "recipe": "math_1",
        "seed": 1,
    }
    assert found["math m=1"].words == math
    assert "model" not in found["swap language=sw m=1 l=1 b=3"].words


def test_the_cells_of_a_small_table() -> None:
    made = plan(TABLE)
    assert made.rows == ["sw.avg", "te.avg"] and made.columns == ["base", "math", "best"]
    base, math, best = (made.cells["sw.avg", column] for column in made.columns)
    assert [item.readings for item in base.items] == [
        ({(): scored("base", "sw")},)
    ] and base.reduce == ()
    assert [item.readings for item in math.items] == [
        ({(): scored(f"math m={m}", "sw")},) for m in (1, 2)
    ]
    assert math.reduce == (("mean", ("m",)),)
    assert best.reduce == (("mean", ("m", "l")),)
    first = best.items[0]
    assert first.at == {"language": "sw", "m": 1, "l": 1}
    assert first.readings == (
        {(b,): scored(f"swap language=sw m=1 l=1 b={b}", "sw") for b in (3, 5)},
    )


def test_the_best_is_one_choice_for_all_that_is_pooled() -> None:
    made = plan(TABLE)
    assert len(made.choices) == 2  # one a language, which the row fixes
    assert sorted(key.rpartition(" in=")[2] for key in made.choices) == ["sw", "te"]
    choice = made.choices[made.cells["sw.avg", "best"].items[0].choice or ""]
    assert choice.axes == ("b",) and choice.at == {"language": "sw"}
    pairs = [(m, n) for m in (1, 2) for n in (1, 2)]
    assert choice.candidates == {
        (b,): tuple(scored(f"swap language=sw m={m} l={n} b={b}", "sw") for m, n in pairs)
        for b in (3, 5)
    }


def test_each_chooses_for_each_value() -> None:
    made = plan(changed("best: {run: swap, best: [b]}", "best: {run: swap, best: [b], each: [m]}"))
    assert sorted(tuple(choice.at.items()) for choice in made.choices.values()) == [
        (("language", language), ("m", m)) for language in ("sw", "te") for m in (1, 2)
    ]
    assert len({item.choice for item in made.cells["te.avg", "best"].items}) == 2


def test_only_what_is_chosen_is_scored_in_other_languages() -> None:
    made = plan(TABLE + '  "{language}.en": {mean: [m, l], in: [en, "{language}"]}\n')
    item = made.cells["sw.en", "best"].items[0]
    english, swahili = item.readings
    chosen = made.chosen[english[()].model]
    assert chosen.choice == item.choice == made.cells["sw.avg", "best"].items[0].choice
    assert chosen.models == {(b,): f"swap language=sw m=1 l=1 b={b}" for b in (3, 5)}
    assert set(swahili) == {(3,), (5,)}  # scored already, to choose
    assert (
        sum(score.language == "en" for score in made.scores if "swap" in score.model) == 2 * 4
    )  # not 16


def test_what_stands_beside_is_scored_everywhere() -> None:
    made = plan(TABLE + '  "{language}.en": {mean: [m, l], in: en}\nbeside: [b]\n')
    assert not made.chosen
    assert set(made.cells["sw.en", "best"].items[0].readings[0]) == {(3,), (5,)}


def test_a_choice_can_be_made_by_other_scores() -> None:
    by = "{run: swap, best: [b], by: {eval.split: dev, language: te, m: 1, in: te}}"
    made = plan(changed("{run: swap, best: [b]}", by))
    (choice,) = made.choices.values()
    assert choice.at == {"language": "te", "m": 1}
    assert [score.model for score in choice.candidates[5,]] == [
        f"swap language=te m=1 l={n} b=5" for n in (1, 2)
    ]
    assert choice.candidates[5,][0].words["eval.split"] == "dev"
    chosen = made.chosen[made.cells["sw.avg", "best"].items[0].readings[0][()].model]
    assert chosen.models[5,].startswith("swap language=sw")


def test_what_stands_beside_a_choice_by_other_questions_is_no_part_of_it() -> None:
    """It is scored and shown.

    The number is that of the one that was chosen there, once, and not again on the test.
    """
    by = "{run: swap, best: [b], by: {eval.split: dev}}"
    made = plan(changed("{run: swap, best: [b]}", by) + "beside: [b]\n")
    item = made.cells["sw.avg", "best"].items[0]
    (reading,) = item.readings
    assert list(reading) == [(), (3,), (5,)] and not is_open_choice(item)
    assert made.chosen[reading[()].model].models == {(b,): reading[b,].model for b in (3, 5)}
    assert {score.words.get("eval.split") for score in reading.values()} == {None}


@pytest.mark.parametrize("other", ["metric: numeric_match", "pair: en-sw"])
def test_a_best_is_shown_in_the_number_that_it_is_chosen_by(other: str) -> None:
    """Else a cell would show the candidate that is best in it, and name the one that was chosen."""
    shown = "{run: swap, best: [b], " + other + "}"
    told = f"column 'best': {other} is not what best compares. Leave it out, or choo"
    assert told in refused(changed("{run: swap, best: [b]}", shown))
    elsewhere = shown.replace("best: [b]", "best: [b], by: {eval.split: dev}")
    (reading,) = (
        plan(changed("{run: swap, best: [b]}", elsewhere)).cells["sw.avg", "best"].items[0].readings
    )
    assert list(reading) == [()]
    plan(changed("{run: swap, best: [b]}", "{run: swap, best: [b], metric: exact_match}"))


def test_all_of_a_run_over_axes_is_a_list_that_closes_them() -> None:
    new = "merge.math: {all: math, over: [m]}, merge.language: {all: language, over: [language, l]}"
    made = plan(changed("merge.math: math, merge.language: language", new))
    assert made.specs["swap b=5"].at == {"b": 5}
    words = made.specs["swap b=5"].words
    assert words["merge.math"] == [Ref("math m=1"), Ref("math m=2")]
    assert words["merge.language"] == [
        Ref(f"language language={a} l={n}") for a in ("sw", "te") for n in (1, 2)
    ]


def test_a_reference_may_fix_an_axis_and_name_a_snapshot() -> None:
    new = "merge.math: {run: math, m: 2}, merge.language: language@500"
    made = plan(changed("merge.math: math, merge.language: language", new))
    words = made.specs["swap language=sw l=1 b=3"].words
    assert words["merge.math"] == Ref("math m=2")
    assert words["merge.language"] == Ref("language language=sw l=1", 500)


def test_the_values_of_an_axis_may_hold_words() -> None:
    made = plan("""
        name: words
        axes:
          way: {full: {sft: full, rate: 5.0e-6, run: math}, lora: {sft: "{kind}_lora", rate: 6.0e-5, run: null}}
          kind: [a, b]
        every: {model: x, sft.learning_rate: "{way.rate}"}
        runs: {math: {stage: sft, expert: math, sft: "{way.sft}"}}
        score: {eval: mgsm_2shot, in: en, mean: [kind]}
        columns: {"{way}": {run: "{way.run}"}}
        """)
    assert list(made.cells) == [("all", "full")]  # null: no run, no cell
    words = [spec.words for spec in made.specs.values()]
    assert [(one["sft"], one["sft.learning_rate"]) for one in words] == [("full", 5.0e-6)] * 2


def test_a_row_and_a_column_of_different_values_leave_the_place_empty() -> None:
    made = plan(
        changed("  math: math\n", "").replace(
            "  best: {run: swap, best: [b]}", '  "of {language}": language'
        )
    )
    assert list(made.cells) == [
        ("sw.avg", "base"),
        ("sw.avg", "of sw"),
        ("te.avg", "base"),
        ("te.avg", "of te"),
    ]


def test_a_row_may_name_the_run_and_the_only_columns_that_it_fills() -> None:
    made = plan(TABLE + "  plain: {run: base, in: en, columns: [math]}\n")
    assert [column for row, column in made.cells if row == "plain"] == ["math"]
    assert made.cells["plain", "math"].items[0].readings == ({(): scored("base", "en")},)


def test_a_run_in_every_is_not_given_to_itself_or_what_it_is_made_of() -> None:
    made = plan(
        changed("eval.dtype: float32}", "eval.dtype: float32, data_root: world}").replace(
            "  base: {}", "  base: {}\n  world: {stage: data, expert: made}"
        )
    )
    assert "data_root" not in made.specs["world"].words
    assert made.specs["math m=1"].words["data_root"] == Ref("world")
    assert made.scores[0].words["data_root"] == Ref("world")


def test_what_a_run_says_itself_the_command_line_does_not_change() -> None:
    made = plan(TABLE, recipe="mine")
    recipes = [made.specs[key].words["recipe"] for key in ("math m=1", "language language=sw l=1")]
    assert recipes == ["math_1", "mine"]


def test_an_existing_model_is_a_row() -> None:
    runs = changed(
        "  base: {}", "  base: {}\n  ours: {checkpoint: hub:org/name}\n  again: {checkpoint: math}"
    )
    made = plan(runs.replace("  base: base", "  base: base\n  ours: ours\n  again: again"))
    assert made.specs["ours"].kind == "checkpoint" and made.specs["ours"].words == {
        "checkpoint": "hub:org/name"
    }
    assert made.specs["again m=2"].words == {"checkpoint": Ref("math m=2")}


def test_facts_and_figures_are_made_and_not_scored() -> None:
    made = plan("""
        name: figures
        axes: {m: [1, 2]}
        every: {model: x}
        runs: {math: {stage: sft, expert: math, seed: "{m}"}, map: {stage: analyze, checkpoint: math}}
        columns: {loss: {run: math, fact: validation_loss, mean: [m]}, figure: {run: map, m: 2}}
        """)
    assert not made.scores
    assert [item.model for item in made.cells["all", "loss"].items] == ["math m=1", "math m=2"]
    assert [item.model for item in made.cells["all", "figure"].items] == ["map m=2"]


def test_the_number_of_a_cell() -> None:
    """Scores made up.

    10 m + l, and 100 more for the swap of b = 5 in Swahili and b = 3 in Telugu.
    """
    made = plan(
        TABLE.replace("{mean: [m, l]}", "{max: [l], mean: [m]}").replace(
            "best: [b]", "best: [b], each: [language]"
        )
        + '  "{language}.en": {mean: [m, l], in: [en, "{language}"]}\n  all:'
        " {max: [l], mean: [m], min: [language]}\n"
    )

    def made_up(score: ScoreRef) -> np.ndarray:
        if score.model in made.chosen:
            return np.array([1000.0])
        at = made.specs[score.model].at
        better = {"sw": 5, "te": 3}.get(at.get("language", ""), 0)
        return np.array(
            [
                10.0 * at.get("m", 0)
                + at.get("l", 0)
                + (100 if "b" in at and at["b"] == better else 0)
            ]
        )

    number = {
        place: evaluate(made, cell, made_up, made_up)[0] for place, cell in made.cells.items()
    }
    assert number["sw.avg", "base"] == 0 and number["sw.avg", "math"] == (10 + 20) / 2
    assert number["te.avg", "best"] == 100 + ((10 + 2) + (20 + 2)) / 2  # the better l of each m
    assert (
        number["te.en", "best"] == (1000 + 100 + (11 + 12 + 21 + 22) / 4) / 2
    )  # English of the chosen, and Telugu
    assert number["all", "best"] == min(number["sw.avg", "best"], number["te.avg", "best"])


def test_published_numbers_are_found_by_the_names_of_row_and_column() -> None:
    place = "layer_swapping.table5 mgsm_8shot_exact_match.{language} base"
    made = plan(
        TABLE.replace("name: small", "name: small\npublished: layer_swapping.table1")
        + f'  "{{language}}.max": {{max: [m, l], published: "{place}"}}\n'
    )
    assert made.cells["sw.avg", "base"].published == ("layer_swapping.table1", "sw.avg", "base")
    assert made.cells["sw.avg", "math"].published is None  # which the paper calls math_expert
    assert made.cells["te.max", "math"].published == (
        "layer_swapping.table5",
        "mgsm_8shot_exact_match.te",
        "base",
    )


def test_a_table_starts_from_another() -> None:
    made = plan("""
        defaults: [layer_swapping_table1]
        name: child
        axes: {language: [sw], weights: null}
        every: {model: other}
        runs: {soup: {merge: soup, merge.experts: [math, language]}}
        columns: {soup: soup}
        rows: {"{language}": {mean: [m, l]}}
        compare: null
        """)
    assert made.columns == ["soup"] and made.rows == ["sw"]
    assert sum(spec.words.get("stage") == "sft" for spec in made.specs.values()) == 6
    assert {
        spec.words["model"] for spec in made.specs.values() if spec.words.get("stage") == "sft"
    } == {"other"}


DERIVED = """
defaults: [layer_swapping_table1]
name: child
runs: {math: null, math run: null, language: null, language run: null, soup: null, swap: null, swap any: null}
score: {eval: mgsm_8shot, in: sw}
columns: {base: base}
rows: {all: {}}
compare: null
"""


def test_what_a_derived_table_no_longer_uses_of_its_parent_is_no_error() -> None:
    """Table 1's math and language runs are selections, whose keys `every` sets.

    Here nothing is selected.
    """
    (score,) = plan(DERIVED).scores
    assert score.words["eval.dtype"] == "float32" and not any(
        key.startswith("select") for key in score.words
    )


def test_too_many_combinations_of_axes_are_refused_before_they_are_expanded() -> None:
    numbers = list(range(500))
    too_many = "combinations of values, more than 200,000. Give fewer values"
    long_axes = changed("m: [1, 2]\n  l: [1, 2]", f"m: {numbers}\n  l: {numbers}")
    of_swap = long_axes.replace("best: [b]", "b: 3")
    assert f"axes m, l: they have 250,000 {too_many}" in refused(of_swap)
    rows = long_axes.replace('"{language}.avg": {mean: [m, l]}', '"{m} {l}": {in: sw}')
    assert f"axes m, l: they have 250,000 {too_many}" in refused(rows)
    cells = rows.replace('"{m} {l}"', '"{m}"').replace("  base: base\n", '  "{l}": base\n')
    assert "500 rows and 502 columns have too many cells. Give axes fewer values" in refused(cells)
    of_choice = changed("m: [1, 2]", f"m: {numbers}").replace("b: [3, 5]", f"b: {numbers}")
    assert f"axes m, l, b: they have 500,000 {too_many}" in refused(of_choice)


def test_equal_words_are_one_run_under_any_name() -> None:
    one, renamed = plan(TABLE), TABLE.replace("math", "sums")
    for word in ("expert: ", '"', "merge."):  # what is no name of a run
        renamed = renamed.replace(f"{word}sums", f"{word}math")
    other = plan(renamed)
    assert sorted(canonical(one).values()) == sorted(canonical(other).values())
    third = plan(changed('seed: "{l}"', 'seed: "{l}", recipe: gentle'))
    shared = set(canonical(one).values()) & set(canonical(third).values())
    assert len(shared) == 3  # base and the math experts; swaps are made of other language experts


NESTED = {  # written with dots -> nested
    "every: {model: base_model, mixture: small, eval.dtype: float32}": (
        "every: {model: base_model, mixture: small, eval: {dtype: float32, limit: 5}, sft:"
        " {steps: 8}}"
    ),
    '{merge: layer_swap, merge.math: math, merge.language: language, merge.bottom_layers: "{b}"}': (
        "{merge: {name: layer_swap, math: math, language: {run: language, l: 1}, bottom_layers:"
        ' "{b}"}}'
    ),
    "{run: swap, best: [b]}": (
        "{run: swap, best: [b], by: {eval: {split: dev}}, eval: {exemplars: random}}"
    ),
}


def test_nested_keys_mean_what_dotted_ones_mean() -> None:
    nested, dotted = TABLE, TABLE
    for written, other in NESTED.items():
        nested = nested.replace(written, other)
    assert nested.count("{split: dev}") == 1
    dotted = dotted.replace(
        "eval.dtype: float32}", "eval.dtype: float32, eval.limit: 5, sft.steps: 8}"
    )
    dotted = dotted.replace("merge.language: language,", "merge.language: {run: language, l: 1},")
    dotted = dotted.replace(
        "best: [b]}", "best: [b], by: {eval.split: dev}, eval.exemplars: random}"
    )
    assert (
        canonical(plan(nested)) == canonical(plan(dotted))
        and plan(nested).scores == plan(dotted).scores
    )
    assert plan(nested).specs["math m=1"].words["sft.steps"] == 8
    assert all(score.words["eval.limit"] == 5 for score in plan(nested).scores)


def test_a_nested_key_of_every_overrides_the_dotted_one_it_inherits() -> None:
    derived = (
        "name: own\ndefaults: [below]\nevery: {eval: {dtype: bfloat16}}\ncolumns: {math: math}\n"
    )
    found = read_table(
        derived, "own.yaml", lambda name: (TABLE, f"{name}.yaml"), {"eval": {"limit": 3}}
    )
    assert (
        found.every["eval.dtype"] == "bfloat16"
        and found.every["eval.limit"] == 3
        and "eval" not in found.every
    )


UNUSED = "unused: {stage: sft, expert: math, seed: 9}"
MATH, SWAP, ROWS = "merge.math: math", "{run: swap, best: [b]}", "rows:"
COLUMN = "  math: math\n"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: small", "name: [small", "mine.yaml, line 2: invalid YAML (expected ',' or ']'"),
        (
            COLUMN,
            "  math: math\n  math: base\n",
            "line 19: invalid YAML (found duplicate key math)",
        ),
        ("columns:", "collumns:", "mine.yaml: unknown key collumns: did you mean columns?"),
        ("  m: [1, 2]", "  m: []", "mine.yaml, axis 'm': it has no values. Give m: [...]"),
        ("  m: [1, 2]", "  m: [1, 1]", "mine.yaml, axis 'm': a value is there twice"),
        (
            'seed: "{m}"',
            'seed: "{n}"',
            "mine.yaml, run 'math': {n} is no axis: there are language, m, l, b",
        ),
        ('seed: "{m}"', "seed: {m}", "mine.yaml, run 'math': seed: {m} needs quotes, \"{m}\""),
        (
            MATH,
            "merge.math: maths",
            (
                "run 'swap': merge.math names 'maths', which is no run of this table: did you "
                "mean math?"
            ),
        ),
        (MATH, "merge.math: swap", "run 'swap': it is among its inputs: swap -> swap"),
        (
            MATH,
            "merge.math: {run: math, m: 3}",
            "run 'swap': m=3 is no value of that axis: there are 1, 2",
        ),
        (MATH, "merge.math: {all: math, over: [n]}", "merge.math.over names 'n', which is no axis"),
        (
            UNUSED,
            "unused: {stage: sft, exprt: math}",
            "mine.yaml, run 'unused': stage=sft does not read exprt: did you mean expert?",
        ),
        (
            UNUSED,
            "unused: {stage: sft, expert: math, 1: 2}",
            "run 'unused': stage=sft does not read 1: there are ",
        ),
        (
            UNUSED,
            "unused: {checkpoint: [hub:a/b]}",
            "run 'unused' is neither a stage, a merge, a checkpoint nor empty",
        ),
        (
            "mixture: small",
            "true: small",
            "mine.yaml, every: no stage has a key True: leave it out",
        ),
        (
            "mixture: small",
            "select.guard_slak: 1",
            "no stage has a key select.guard_slak: did you mean select.gua",
        ),
        (
            "mixture: small",
            "tracking.mode: offline",
            "tracking.mode is not of the runs but of the command",
        ),
        (
            ROWS,
            "controls: [{math: 1}]\nrows:",
            "controls: \"{'math': 1}\" is not a run. Give true, or there are base",
        ),
        (
            UNUSED,
            "unused: {expert: math}",
            "mine.yaml: run 'unused' is neither a stage, a merge, a checkpoint nor empty",
        ),
        (
            "model: base_model, ",
            "",
            "mine.yaml, run 'base': it is empty, the model of every, and every names no model",
        ),
        (
            COLUMN,
            "  math: mth\n",
            "row 'sw.avg', column 'math': 'mth' is no run: did you mean math?",
        ),
        (
            COLUMN,
            "  math: {eval: mgsm_8shot}\n",
            "column 'math': it names no run: there are base, math",
        ),
        (
            COLUMN,
            "  math: {run: [math]}\n",
            "column 'math': \"['math']\" is no run: did you mean math?",
        ),
        (
            COLUMN,
            '  math: {run: "{m}"}\n',
            "column 'math': {m} names m, which neither of them fixes",
        ),
        (
            COLUMN,
            '  "x{b}": {run: swap, b: 3}\n  x3: math\n',
            "mine.yaml, column 'x3': there are two columns",
        ),
        (
            "best: [b]",
            "best: [d]",
            "column 'best': best names 'd', which is no axis: there are language, m, l, b",
        ),
        (
            "best: [b]",
            "each: [m]",
            "column 'best': each is about what best chooses. Give best=[...] with it",
        ),
        (SWAP, "swap", "row 'sw.avg', column 'best': b left open. Name in mean, max, min or best"),
        ("{mean: [m, l]}", "{mean: [m]}", "row 'sw.avg', column 'best': l left open"),
        (
            "{mean: [m, l]}",
            "{mean: [m, k]}",
            "mean: 'k' is no axis: there are language, m, l, b",
        ),
        (
            "{mean: [m, l]}",
            "{mean: [m, l], columns: [maths]}",
            "columns: 'maths' is no column: did you mean math?",
        ),
        (
            "score: {eval: mgsm_2shot,",
            "score: {",
            "it has no eval. Give score: {eval: mgsm_2shot}",
        ),
        (
            COLUMN,
            "  math: {run: math, eval.dtype: bfloat16}\n",
            (
                "column 'math': eval.dtype=bfloat16 for math "
                "m=1 and float32 for base: one for all rows, in every"
            ),
        ),
        (
            ROWS,
            "compare: {best: [best]}\nrows:",
            "compare: ['best', 'best'] are not two rows or two columns",
        ),
        (
            ROWS,
            "compare: {best: [sw.avg]}\nrows:",
            "compare: ['best', 'sw.avg'] are not two rows or two columns",
        ),
        (
            ROWS,
            "compare: {best: [maths]}\nrows:",
            "compare: 'maths' is no column or row: did you mean math?",
        ),
        (
            ROWS,
            "free_snapshots: maybe\nrows:",
            "mine.yaml: free_snapshots=maybe: give true or false",
        ),
        (
            "best: [b]",
            "best: [b], by: {run: math}",
            "column 'best', by: it says what is scored. Leave run",
        ),
        (
            'in: "{language}"',
            "in: no",
            'mine.yaml, score: in: no is false in YAML. Write Norwegian as in: "no"',
        ),
        (ROWS, "published: a b\nrows:", "published: a b is neither TABLE nor TABLE ROW COLUMN"),
        (
            "name: small",
            "name: ../../out",
            "mine.yaml: name=../../out is not the name of a folder. Use letters",
        ),
        ("name: small", "name: my/table", "mine.yaml: name=my/table is not the name of a folder"),
        (
            "float32}",
            "float32, eval: {dtype: x}}",
            "every: eval.dtype is given twice, nested and with a dot",
        ),
    ],
)
def test_what_is_no_table_is_refused_by_file_and_row(old: str, new: str, expected: str) -> None:
    assert expected in refused(changed(old, new))


def test_a_circle_of_runs_is_named() -> None:
    text = changed(MATH, "merge.math: a").replace(
        "  base: {}",
        "  base: {}\n  a: {stage: sft, expert: math, model: trained, model.path: b}\n"
        "  b: {stage: merge, merge: soup, merge.experts: [swap, math]}",
    )
    assert "is among its inputs: a -> b -> swap -> a" in refused(text)


def test_tables_that_start_from_each_other_are_refused() -> None:
    def find(name: str) -> tuple[str, str]:
        return f"defaults: [{'b' if name == 'a' else 'a'}]\nname: {name}\n", f"{name}.yaml"

    with pytest.raises(PipelineError, match="^a.yaml: defaults: b starts from itself$"):
        read_table(*find("a"), find, {})


def test_a_table_without_runs_and_one_that_is_a_list_are_refused() -> None:
    assert "runs is missing" in refused("name: x\ncolumns: {a: b}\n")
    assert "a table is a mapping" in refused("- name\n")
    assert "is missing" in refused("")


def test_a_stage_that_is_none_is_refused_by_its_run() -> None:
    def reads(stage: str) -> set[str]:
        if stage not in READS:
            raise PipelineError(f"stage={stage} is no stage")
        return READS[stage]

    text = changed("{stage: sft, expert: math, seed: 9}", "{stage: stf, expert: math, seed: 9}")
    with pytest.raises(PipelineError, match="^mine.yaml, run 'unused': stage=stf is no stage$"):
        expand_table(read_table(text, "mine.yaml", shipped, {}), reads)
