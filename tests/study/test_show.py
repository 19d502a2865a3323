"""stage=show, and the scores that an evaluation ends with, against the files of the runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Make

from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import score_lines


def shown(call: Call, folder: Path, *words: str) -> Any:
    return call(
        "stage=show", f"run={folder.name}", f"runs_dir={folder.parent}", *words, status=0
    ).out


def test_a_training(math_expert: Path, call: Call) -> None:
    text = shown(call, math_expert)
    kept = json.loads((math_expert / "manifest.json").read_text())
    assert text.startswith(f"{math_expert.name}\nstage=sft, attempt 1, began {kept['started']}\n")
    assert f"hash {kept['hash']}" in text
    assert (
        f"  sft.steps={kept['decided_by']['config']['sft']['steps']}\n" in text
        and "  sft.separator=' '\n" in text
    )
    for role, parent in kept["parents"].items():
        assert any(
            line.split() == [role, parent["name"], parent["hash"][:12]]
            for line in text.splitlines()
        )
    logged = [json.loads(line) for line in (math_expert / "log.jsonl").read_text().splitlines()]
    last = [row for row in logged if "loss" in row][-1]
    assert any(
        line.split()[:2] == [str(last["step"]), f"{last['loss']:.4g}"]
        for line in text.splitlines()
        if line
    )


def test_rows_of_a_training_with_the_trained_part_marked(math_expert: Path, call: Call) -> None:
    text = shown(call, math_expert, "show.rows=2")
    manifest = json.loads((math_expert / "manifest.json").read_text())
    data = next(math_expert.parent.glob(f"*{manifest['parents']['data']['hash'][:12]}"))
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()[:2]]
    marked = "".join(text.partition("rows (what is trained on is marked):\n")[2].split())
    for row in rows:
        prompt, completion = ("".join(row[key].split()) for key in ("prompt", "completion"))
        assert f"{prompt}[[{completion}</s>]]" in marked.replace("|", "").replace("<s>", "")


def test_an_evaluation_with_its_scores(scored: Path, call: Call) -> None:
    text = shown(call, scored)
    rows = json.loads((scored / "scores.json").read_text())["rows"]
    main_score = next(row for row in rows if (row["task"], row["language"]) == ("mgsm", "qac"))
    line = next(
        line for line in text.splitlines() if line.startswith("  mgsm 0-shot") and "qac" in line
    )
    score, low, to, high, n = line.split()[-5:]
    assert (score, to, n) == (f"{100 * main_score['value']:.1f}", "to", str(main_score["n"]))
    assert 0 <= float(low.strip("(")) <= float(score) <= float(high.strip(")")) <= 100


def test_an_evaluation_ends_with_its_scores_also_when_it_was_finished(
    make_run: Make, world: Path, swap: Path, scored: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["eval=sandbox", "eval.max_gen_toks=4", "eval.limit=3", "languages=[en,qac]"]
    assert make_run("stage=eval", f"checkpoint={swap}", f"data_root={world}", *asked) == scored
    told = capfd.readouterr()
    assert told.out == "" and "scores:\n  task" in told.err and "mgsm 0-shot" in told.err


@pytest.mark.parametrize(
    "text", ['{"rows": [', "[]", '{"rows": [1]}', '{"rows": [{"task": "mgsm"}]}']
)
def test_scores_that_cannot_be_read_name_their_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(text)
    with pytest.raises(
        PipelineError, match=f"^scores.json of {tmp_path.name} cannot be read. Rerun it with redo"
    ):
        score_lines(tmp_path)


def test_an_unfinished_run_is_left_to_stage_status(call: Call, tmp_path: Path) -> None:
    work = tmp_path / "runs/.work" / ("a" * 64)
    work.mkdir(parents=True)
    state = {"name": "math-full-s0-aaaa", "stage": "sft", "state": "failed"}
    (work / "state.json").write_text(json.dumps(state))
    told = call("stage=show", "run=math-full", f"runs_dir={tmp_path}/runs", status=1)
    assert "math-full-s0-aaaa is not finished, it is failed: see stage=status" in told.err
