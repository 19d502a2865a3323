"""Random tables and spelled numbers against what is known of them.

Read right, or refused in one sentence.
"""

import csv
import io
import json
import tempfile
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import read_source

from pipeline.config.compose import compose
from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import last_number
from pipeline.tables.planned_runs import Planning

LETTERS = "aZ09 .,;\t\"'\r|{}%#é\u0301ß中\u200b\u2028😀NA-"
CELLS = st.sampled_from(
    ["NA", "None", "nan", "True", "007", "3.10", "1e3", "1,000", "  x", "\\N", ""]
) | st.text(st.sampled_from(LETTERS), max_size=12)
ROWS = st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=8)


def read(name: str, text: str, stream: bool = False) -> list[Any]:
    """(q, a) of each row, None for one that is left out."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(text.encode())
        source = Source(file=name, rows="template", prompt="{q}", completion="{a}", stream=stream)
        found = list(read_source("own", source, Path(folder)))
    return [(one["prompt"], one["completion"]) if isinstance(one, dict) else None for one in found]


def known(rows: list[tuple[str, str]]) -> list[Any]:
    return [row if all(one.strip() for one in row) else None for row in rows]


@given(ROWS, st.sampled_from([",", "\t"]), st.booleans(), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=30, deadline=None)
def test_tables_are_read_as_python_writes(
    rows: list[tuple[str, str]], separator: str, stream: bool, end: str
) -> None:
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=separator, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(
        [("q", "a"), *rows]
    )
    name = "a.csv" if separator == "," else "a.tsv"
    assert sorted(map(str, read(name, written.getvalue(), stream))) == sorted(map(str, known(rows)))
    for damaged in (
        separator + "z",
        f'{end}"z',
        f"{end}{separator.join('zzz')}",
    ):  # a cell more, an open mark, a row
        with pytest.raises(PipelineError) as refused:
            read(name, written.getvalue().rstrip("\r\n") + damaged, stream)
        assert "\n" not in str(refused.value)


@given(st.lists(CELLS | st.integers(-9, 10**20) | st.none(), min_size=1, max_size=8), st.booleans())
@settings(max_examples=30, deadline=None)
def test_json_is_read_as_python_writes_it(values: list[Any], listed: bool) -> None:
    lines = [json.dumps({"q": str(number), "a": value}) for number, value in enumerate(values)]
    text = f"[{','.join(lines)}]" if listed else "\n".join(lines)
    rows = [
        (str(number), "" if value is None else str(value)) for number, value in enumerate(values)
    ]
    assert read("a.json" if listed else "a.jsonl", text) == known(rows)
    with pytest.raises(PipelineError) as refused:
        read("a.jsonl", text.rstrip("]") + "\n[1")
    assert "\n" not in str(refused.value)


@given(
    st.integers(0, 99) | st.integers(100, 10**12),
    st.sampled_from(["0123456789", "０１２３４５６７８９", "০১২৩৪৫৬৭৮৯"]),
)
@settings(max_examples=150, deadline=None)
def test_numbers_are_read_in_any_spelling(whole: int, digits: str) -> None:
    groups = f"{whole:,}"
    spelled = {
        str(whole): 0,
        groups: 0,
        groups.replace(",", "."): 0,
        groups.replace(",", "\u202f"): 0,
        f"${groups}": 0,
    }
    spelled |= {f"{whole}.0": 0, f"{whole}.50": 0.5, f"{groups}.5": 0.5}
    for spelling, more in spelled.items():
        for around in ("{}", "答えは{}円です。", "First 7, then {}.", "**{}**", "= {} km"):
            text = around.format(spelling.translate(str.maketrans("0123456789", digits)))
            assert last_number(text) == Fraction(whole) + Fraction(more), text


STUDY = """
base: sandbox
experts: {math: {expert: math}, mine: {run: ./m, side: language}, own: {train: FILE, prompt: "{q}", completion: "{a}"}}
methods: {layer_swap: {scale_to_depth: true}, soup: {}, narrow: {merge: ties, density: 0.2}}
languages: [en, qac]
benchmarks: [mgsm_0shot]
controls: true
every: {data_root: ./data, threads: 1, eval: {limit: 4}}
"""
TABLE = """
name: small
axes: {seed: [0, 1], way: {soup: {merge: soup}, ties: {merge: ties}}}
every: {model: sandbox, data_root: ./data}
runs:
  base: {}
  math: {stage: sft, expert: math, seed: "{seed}"}
  language: {stage: sft, expert: qac, seed: "{seed}"}
  merged: {merge: "{way.merge}", merge.experts: [math, language]}
score: {eval: mgsm_0shot, mean: [seed]}
rows: {base: {run: base}, "{way}": {run: merged}}
columns: {low: {in: qac}, english: {in: en, eval.limit: 5}}
compare: {soup: [base]}
controls: true
"""
ODD: Any = [
    None,
    [],
    {},
    "",
    0,
    1.5,
    True,
    "x",
    "{x}",
    [None],
    [["x"]],
    {"x": 1},
    {"x": None},
    {1: 2},
    float("nan"),
]


def places_in(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [
        place for key, part in inside for place in [(*above, key), *places_in(part, (*above, key))]
    ]


@given(st.sampled_from([STUDY, TABLE]), st.data())
@settings(max_examples=120, deadline=None)
def test_a_table_with_another_form_in_one_place_is_planned_or_refused(
    text: str, data: st.DataObject
) -> None:
    """A value of another type, a key that YAML reads as a truth value, or none.

    Never a traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        file.write_text("q,a\n" + "1 + 1?,2\n" * 9)
        tree = deepcopy(yaml.safe_load(text.replace("FILE", str(file))))
        *path, last = data.draw(st.sampled_from(places_in(tree)))
        holder = tree
        for key in path:
            holder = holder[key]
        how = data.draw(st.sampled_from(["value", "key", "gone", "listed"]))
        value = holder.pop(last)
        new = last if how != "key" else data.draw(st.sampled_from([True, 1, None, f"{last}x"]))
        value = (
            data.draw(st.sampled_from(ODD))
            if how == "value"
            else [value]
            if how == "listed"
            else value
        )
        if how != "gone":
            holder.insert(last, value) if isinstance(holder, list) else holder.update({new: value})
        (Path(folder) / "t.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True))
        words = [
            "stage=plan",
            f"table={folder}/t.yaml",
            f"runs_dir={folder}/runs",
            "tracking.mode=disabled",
        ]
        try:
            Planning.of(compose(words)).targets()
        except PipelineError as error:
            assert all(
                "\n" not in line for line in str(error).split("\nerror: ")
            )  # a line for each mistake
