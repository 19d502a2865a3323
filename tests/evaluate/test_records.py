"""What scores.json holds: the same keys in the same order for every score, read back as it was written."""

import json
from pathlib import Path

from pipeline.benchmarks.task_files import Definition
from pipeline.evaluate.records import (
    EvaluationResult,
    ScoreRow,
    language_rows,
    missing_row,
    read_scores,
    write_evaluation,
)

ROW = ScoreRow("flores", "sw", "en-sw", None, 0, "chrf++", "none", 43.25, None, 50)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    definition = Definition("flores_en-sw_0shot", tmp_path / "task.yaml", "flores", "sw", "en-sw", 0)
    samples = [{"doc_id": 0, "response": "maji\u2028"}]
    missing = missing_row("mbpp", "sw", 0, "no translation")
    result = EvaluationResult([ROW], {definition.name: samples}, {"backend": "hf"}, beside=[missing])
    assert write_evaluation(result, [definition], tmp_path) == {"flores/en-sw/chrf++": 43.25}
    assert read_scores(tmp_path / "scores.json") == ([ROW, missing], {"backend": "hf"})
    assert json.loads((tmp_path / "samples/flores.en-sw.jsonl").read_text(encoding="utf-8")) == samples[0]


def test_the_language_of_answers_is_told_beside() -> None:
    """Three answers in the small world, the last one in another script."""
    definition = Definition("mgsm_qac_0shot", Path("task.yaml"), "mgsm", "qac", None, 0)
    texts = ["2 * 3 = 6. 5 + 6 = 11. The answer is 11.", "2 * 3 = 7. 5 + 7 = 12. The answer is 12."]
    texts += ["উত্তর হল বারো, এর বেশি নয়"]
    (row,) = language_rows(definition, [{"response": text} for text in texts])
    assert (row.metric, row.filter, round(row.value or 0, 3), row.n) == ("other_language", "script", 0.333, 3)
    assert language_rows(definition, [{"response": "11"}]) == []  # nothing to have a share of
    english = Definition("mgsm_en_cot_sw_2shot", Path("task.yaml"), "mgsm_en_cot", "sw", None, 2)
    (row,) = language_rows(english, [{"response": "The answer is eleven balls."}])
    assert (row.metric, row.filter, row.value) == ("other_language", "py3langid", 0)  # English is asked for
