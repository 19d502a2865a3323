"""What is no table, or says something that does nothing: one sentence with file and row."""

from typing import Any

import pytest
from planned import READS, plan, shipped
from test_rows import changed

from pipeline.errors import PipelineError
from pipeline.tables.expand import expand_table
from pipeline.tables.schema import read_table

UNUSED = "unused: {stage: sft, expert: math, seed: 9}"
MATH, SWAP, ROWS = "merge.math: math", "{run: swap, best: [b]}", "rows:"
COLUMN = "  math: math\n"


def refused(text: str, **every: Any) -> str:
    with pytest.raises(PipelineError) as caught:
        plan(text, **every)
    message = str(caught.value)
    assert message.startswith("mine.yaml") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: small", "name: [small", "mine.yaml, line 2: invalid YAML (expected ',' or ']'"),
        (COLUMN, "  math: math\n  math: base\n", "line 19: invalid YAML (found duplicate key math): give it once"),
        ("columns:", "collumns:", "mine.yaml: unknown key collumns: did you mean columns?"),
        ("  m: [1, 2]", "  m: []", "mine.yaml, axis 'm': it has no values: give m: [...]"),
        ("  m: [1, 2]", "  m: [1, 1]", "mine.yaml, axis 'm': a value is there twice"),
        ("  m: [1, 2]", "  m: [1, 2]\n  n: [1]", "mine.yaml, axis 'n': no run, row or column names it: leave it out"),
        ('seed: "{m}"', 'seed: "{n}"', "mine.yaml, run 'math': {n} is no axis: there are language, m, l, b"),
        ('seed: "{m}"', "seed: {m}", 'mine.yaml, run \'math\': seed: {m} needs quotes, "{m}"'),
        (MATH, "merge.math: maths", "run 'swap': merge.math names 'maths', which is no run of this table: did you "
         "mean math?"),
        (MATH, "merge.math: swap", "run 'swap': it is made of itself: swap -> swap"),
        (MATH, "merge.math: {run: math, m: 3}", "run 'swap': m=3 is no value of that axis: there are 1, 2"),
        (MATH, "merge.math: {all: math, over: [n]}", "merge.math.over names 'n', which is no axis"),
        (UNUSED, "unused: {stage: sft, exprt: math}", "mine.yaml, run 'unused': stage=sft does not read exprt: did "
         "you mean expert?"),
        (UNUSED, "unused: {stage: sft, expert: math, 1: 2}", "run 'unused': stage=sft does not read 1: there are "),
        (UNUSED, "unused: {checkpoint: [hub:a/b]}", "run 'unused' is neither a stage, a merge, a checkpoint nor empty"),
        ("mixture: small", "true: small", "mine.yaml, every: no run of this table reads True"),
        (ROWS, "controls: [{math: 1}]\nrows:", "controls: \"{'math': 1}\" is not a run: give true, or there are base"),
        (UNUSED, "unused: {expert: math}", "mine.yaml: run 'unused' is neither a "
         "stage, a merge, a checkpoint nor empty"),
        ("model: base_model, ", "", "mine.yaml, run 'base': it is empty, the model of every, and every names no model"),
        ("mixture: small", "analyze.axis: input", "mine.yaml, every: no run of this table reads analyze.axis"),
        (COLUMN, "  math: mth\n", "row 'sw.avg', column 'math': 'mth' is no run: did you mean math?"),
        (COLUMN, "  math: {eval: mgsm_8shot}\n", "column 'math': it names no run: there are base, math"),
        (COLUMN, "  math: {run: [math]}\n", "column 'math': \"['math']\" is no run: did you mean math?"),
        (COLUMN, "  math: {run: math, b: 3}\n", "column 'math': b=3, and no run in it has that axis"),
        (COLUMN, '  math: {run: "{m}"}\n', "column 'math': {m} names m, which neither of them fixes"),
        (COLUMN, '  "x{b}": {run: swap, b: 3}\n  x3: math\n', "mine.yaml, column 'x3': there are two columns"),
        ("best: [b]", "best: [d]", "column 'best': best names 'd', which is no axis: there are language, m, l, b"),
        (SWAP, "{run: base, best: [b]}", "column 'best': best names b, and no run in it has"),
        ("best: [b]", "each: [m]", "column 'best': each is about what best chooses: give best=[...] beside it"),
        (SWAP, "swap", "row 'sw.avg', column 'best': b left open: name in mean, max, min or best"),
        ("{mean: [m, l]}", "{mean: [m]}", "row 'sw.avg', column 'best': l left open"),
        ("{mean: [m, l]}", "{mean: [m, k]}", "'k' is neither an axis nor a row to reduce over: there are"),
        ("{mean: [m, l]}", "{mean: [m, l], columns: [maths]}", "columns: 'maths' is no column: did you mean math?"),
        ("score: {eval: mgsm_2shot,", "score: {", "nothing says eval of it: give score: {eval: mgsm_2shot}"),
        (COLUMN, "  math: {run: math, eval.dtype: bfloat16}\n", "column 'math': eval.dtype=bfloat16 for math "
         "m=1 and float32 for base: one for all rows, in every"),
        (ROWS, "compare: {best: [maths]}\nrows:", "compare: 'maths' is no column or row: did you mean math?"),
        (ROWS, "free_snapshots: maybe\nrows:", "mine.yaml: free_snapshots=maybe: give true or false"),
        ("best: [b]", "best: [b], by: {run: math}", "column 'best', by: it says what is scored: leave run"),
        ('in: "{language}"', "in: no", 'mine.yaml, score: in: no is false in YAML: write Norwegian as in: "no"'),
        (ROWS, "published: a b\nrows:", "published: a b is neither TABLE nor TABLE ROW COLUMN"),
        ("name: small", "name: ../../out", "mine.yaml: name=../../out is not the name of a folder: use letters"),
        ("name: small", "name: my/table", "mine.yaml: name=my/table is not the name of a folder"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused_by_file_and_row(old: str, new: str, expected: str) -> None:
    assert expected in refused(changed(old, new))


def test_a_circle_of_runs_is_named() -> None:
    text = changed(MATH, "merge.math: a").replace(
        "  base: {}", "  base: {}\n  a: {stage: sft, expert: math, model: trained, model.path: b}\n"
        "  b: {stage: merge, merge: soup, merge.experts: [swap, math]}")  # fmt: skip
    assert "is made of itself: a -> b -> swap -> a" in refused(text)


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
