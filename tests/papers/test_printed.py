"""What the papers print.

As transcribed, equal where it is printed twice, and marked where it is not.
"""

import csv

import pytest
from published_maps import published_maps

from pipeline.errors import PipelineError
from pipeline.papers.published import (
    HEATMAPS,
    load_tables,
    published_rows,
    published_table,
    published_value,
    reason_for_doubt,
)


def test_numbers_by_key_row_and_column() -> None:
    assert published_value("layer_swapping.table1", "sw.avg", "layer_swap_default") == 32.4
    assert published_value("layer_swapping.table5", "belebele_5shot_accuracy.te", "te") == 60.2
    assert (
        published_value("layer_swapping.table5", "belebele_5shot_accuracy.te", "sw") is None
    )  # not reported
    assert published_value("unreasonable.table3", "en", "simultaneous_full") == 81.8
    assert published_value("unreasonable.table_a8", "aya_expanse_8b", "mgsm_te") == 3.2
    assert published_value("unreasonable.table_a3", "10", "mgsm_sw") is None  # its cells are lost
    assert published_table("layer_swapping.training")["samples_joint"] == 80000


@pytest.mark.parametrize(
    ("read", "asked", "words"),
    [
        (
            published_table,
            "unreasonable.tabel3",
            "there is no unreasonable.tabel3: did you mean unreasonable.table3",
        ),
        (published_table, "layerswapping.table1", "did you mean layer_swapping.table1"),
        (published_value, "unreasonable.table3 sw layer_swap", "did you mean layer_swap_"),
        (
            published_value,
            "unreasonable.table3 ja base",
            "there is no ja: there are sw, bn, te, en, target_avg",
        ),
        (published_rows, "unreasonable.partitions", "is not a table of numbers: it has A, B, C, Z"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(read, asked, words) -> None:
    with pytest.raises(PipelineError, match=r"^[^\n]*$") as told:
        read(*asked.split())
    assert words in str(told.value)


def test_every_row_has_a_number_a_column_and_every_mark_names_something() -> None:
    for paper, tables in load_tables().items():
        for name, table in tables.items():
            if "columns" not in table:
                continue
            found, columns = published_rows(f"{paper}.{name}"), table["columns"]
            assert all(len(row) == len(columns) for row in found.values()), name
            groups = {
                row.rsplit(".", depth)[0] for row in found for depth in range(row.count(".") + 1)
            }
            cells = {f"{row}.{column}" for row in found for column in columns}
            assert set(table.get("suspect", {})) <= cells | groups | set(columns) | {
                "caption",
                "text",
            }, name


# Of one figure printed in two places: table, row, column of each. A name in braces is each of
# FILLED.
TWICE = """
layer_swapping.table1 {l}.avg math_expert             layer_swapping.table5 mgsm_8shot_exact_match.{l} math
layer_swapping.table1 {l}.avg language_expert         layer_swapping.table5 mgsm_8shot_exact_match.{l} {l}
layer_swapping.table1 {l}.avg base                    layer_swapping.table5 mgsm_8shot_exact_match.{l} base
layer_swapping.table1 {l}.avg layer_swap_default      layer_swapping.table6 {l} layer_swap_pairwise_avg
layer_swapping.table1 sw.avg {m}                      layer_swapping.table2 sw_avg {m}
layer_swapping.table1 sw.max layer_swap_best          layer_swapping.table2 sw_max layer_swap_best
layer_swapping.table2 en_avg base                     layer_swapping.table5 mgsm_8shot_exact_match.en base
layer_swapping.table2 en_avg math_expert              layer_swapping.table5 mgsm_8shot_exact_match.en math
layer_swapping.table2 en_avg language_expert          layer_swapping.table5 mgsm_8shot_exact_match.en sw
layer_swapping.table2 all_languages_avg base          layer_swapping.table5 mgsm_8shot_exact_match.ten_language_avg base
layer_swapping.table2 all_languages_avg math_expert   layer_swapping.table5 mgsm_8shot_exact_match.ten_language_avg math
unreasonable.table1 data_mixing full_sft              unreasonable.table3 target_avg data_mixing_full
unreasonable.table1 simultaneous_sft partial_sft      unreasonable.table3 target_avg simultaneous_full
unreasonable.table1 simultaneous_sft partial_lora     unreasonable.table3 target_avg simultaneous_lora
unreasonable.table1 layer_swapping full_sft           unreasonable.table3 target_avg layer_swap_full
unreasonable.table1 layer_swapping {t}                unreasonable.table3 target_avg layer_swap_{t}
unreasonable.table1 {e}_only full_sft                 unreasonable.table_a1 target_avg {e}_full
unreasonable.table1 {e}_only lora                     unreasonable.table_a1 target_avg {e}_lora
unreasonable.table1 {e}_only partial_sft              unreasonable.table_a1 target_avg {e}_partial
unreasonable.table1 data_mixing lora                  unreasonable.table_a1 target_avg mixing_lora
unreasonable.table3 {r} data_mixing_full              unreasonable.table_a1 {r} mixing_full
unreasonable.table3 {r} base                          unreasonable.table_a1 {r} base
unreasonable.table2 none frozen_during                unreasonable.table_a1 en math_full
unreasonable.table2 base frozen_during                unreasonable.table3 en base
"""
FILLED = {
    "{l}": "sw te bn ja",
    "{r}": "sw bn te en target_avg",
    "{m}": "base language_expert math_expert model_soup_best layer_swap_default",
    "{t}": "lora partial_sft partial_lora",
    "{e}": "math language",
}


def pairs() -> list[list[str]]:
    found = []
    for line in TWICE.strip().splitlines():
        mark = next((mark for mark in FILLED if mark in line), "")
        found += [
            line.replace(mark, name).split() if mark else line.split()
            for name in FILLED.get(mark, "-").split()
        ]
    return found


@pytest.mark.parametrize("place", pairs(), ids=" ".join)
def test_what_is_printed_twice_agrees_or_is_marked_in_both_places(place: list[str]) -> None:
    one, other = place[:3], place[3:]
    agree = published_value(*one) == pytest.approx(published_value(*other), abs=0.051)
    marked = [reason_for_doubt(*there) for there in (one, other)]
    assert agree or all(marked), marked


def test_every_score_of_table_5_is_in_percent() -> None:
    """The least score in print is 12.0 % (Telugu); a fraction would be below 1."""
    numbers = [
        one
        for row in published_rows("layer_swapping.table5").values()
        for one in row
        if one is not None
    ]
    assert len(numbers) == 82 and all(12 <= one <= 100 for one in numbers)


def test_means_of_printed_numbers_are_the_printed_means_or_are_marked() -> None:
    models = [
        "llama3.1_8b_instruct",
        "qwen2.5_7b_instruct",
        "aya_expanse_8b",
        "falcon3_7b_instruct",
    ]
    for table in ("unreasonable.table3", "unreasonable.table_a1"):
        for row in ("sw", "bn", "te", "en"):
            mean = (
                sum(
                    published_value("unreasonable.table_a8", model, f"mgsm_{row}")
                    for model in models
                )
                / 4
            )
            assert (abs(published_value(table, row, "base") - mean) < 0.051) == (
                reason_for_doubt(table, row, "base") is None
            )
        for column in published_table(table)["columns"]:
            mean = sum(published_value(table, row, column) for row in ("sw", "bn", "te")) / 3
            assert published_value(table, "target_avg", column) == pytest.approx(mean, abs=0.051)


def test_contradictions_between_words_and_numbers_are_marked() -> None:
    """Computed here, from what the text claims (layer_swapping 5.1; unreasonable 5 and table 2)."""
    for lang in ("sw", "te", "bn", "ja"):
        row = ("layer_swapping.table1", f"{lang}.avg")
        below = published_value(*row, "layer_swap_default") < published_value(
            *row, "model_soup_best"
        )
        assert below == (reason_for_doubt(*row, "layer_swap_default") is not None)
        pairwise = published_value("layer_swapping.table6", lang, "model_soup_pairwise_avg")
        assert pairwise == published_value(*row, "model_soup_best")  # "best" there, "default" here
        assert "table1's best" in reason_for_doubt(
            "layer_swapping.table6", lang, "model_soup_pairwise_avg"
        )
    key = "unreasonable.table1"
    best_baseline = max(
        published_value(key, row, "full_sft")
        for row in ("math_only", "language_only", "data_mixing")
    )
    for row in ("simultaneous_sft", "layer_swapping"):
        for column in ("partial_lora", "partial_sft", "lora", "full_sft"):
            number = published_value(key, row, column)
            assert (number is not None and number <= best_baseline) == (
                reason_for_doubt(key, row, column) is not None
            )
    partial = [
        published_value("unreasonable.table2", row, "frozen_during")
        for row in published_rows("unreasonable.table2")
        if row[1:2] == "_"
    ]
    assert published_value("unreasonable.table_a1", "en", "math_partial") > max(partial)
    assert reason_for_doubt("unreasonable.table_a1", "en", "math_partial")
    assert published_value("unreasonable.table_a2", "bn", "base") == published_value(
        "unreasonable.table_a8", "qwen2.5_7b_instruct", "mgsm_bn"
    )
    assert "Instruct" in reason_for_doubt("unreasonable.table_a2", "bn", "base")
    assert "nine languages" in reason_for_doubt(
        "layer_swapping.table2", "all_languages_avg", "ties_best"
    )
    assert "spBLEU" in reason_for_doubt("layer_swapping.table5", "flores_0shot_bleu.en-te", "base")
    assert reason_for_doubt("layer_swapping.table5", "mgsm_8shot_exact_match.sw", "base") is None


def test_the_shares_of_the_maps_that_cannot_be_shares_are_marked_and_kept() -> None:
    """A share of 4,096 input features (w2: 14,336), printed to six digits."""
    impossible = set()
    with open(HEATMAPS, newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            for column, text in list(row.items())[3:]:
                features = 14336 if column.endswith("w2") else 4096
                if f"{round(float(text) * features) / features:.6f}" != text:
                    impossible.add(f"{row['figure']}.{row['layer']}.{column}")
                    told = reason_for_doubt(
                        "layer_swapping.figures", f"{row['figure']}.{row['layer']}", column
                    )
                    assert told and told.startswith(text)
                    likely = float(told.split()[-1])
                    assert f"{round(likely * features) / features:.6f}" == f"{likely:.6f}"
    figures = published_table("layer_swapping.figures")
    assert impossible == set(figures["suspect"]) and len(impossible) == 6
    assert figures["file"] == HEATMAPS.name and len(published_maps()) == 6
