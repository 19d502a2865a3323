"""BLEU, chrF++ and spBLEU as columns of a table, against sacrebleu's own command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.commands.table import make_table
from pipeline.config.compose import compose
from pipeline.report.cells import cell_result
from pipeline.report.load.contents import CellResult
from pipeline.report.stored import StoredAnswers
from pipeline.tables.planned_runs import Planning

PAIRS = ("en-qac", "qac-en")


def table(folder: Path, world: Path) -> str:
    columns = "{bleu: {metric: bleu}, chrf: {metric: chrf++}, spbleu: {metric: spbleu}, plain: {}}"
    (folder / "flores.yaml").write_text(
        f"name: flores\nevery: {{data_root: {world}}}\nruns: {{base: {{checkpoint:"
        " package:data/sandbox_base}}\nscore: {run: base, eval: flores_0shot,"
        f" eval.max_gen_toks: 30, in: qac}}\ncolumns: {columns}\nrows: {{en-qac: {{pair: en-qac}},"
        " qac-en: {pair: qac-en}}\n"
    )
    return f"table={folder}/flores.yaml"


def made(*words: str) -> StoredAnswers:
    make_table(compose(["stage=table", *words, "tracking.mode=disabled"]))  # type: ignore[arg-type]
    return StoredAnswers(Planning.of(compose(["stage=table", *words])))  # type: ignore[arg-type]


def cells_of(stored: StoredAnswers) -> dict[tuple[str, str], CellResult]:
    return {place: cell_result(stored, cell) for place, cell in stored.table.plan.cells.items()}


def sides(stored: StoredAnswers, pair: str, folder: Path) -> tuple[Path, Path]:
    """Files of the references and the answers, a line each."""
    (name,) = cells_of(stored)[pair, "chrf"].runs
    found = map(stored.table.evaluation_of, stored.table.plan.scores)
    (run,) = {one.folder for one in found if one and one.folder.name == name}
    samples = [
        json.loads(line) for line in (run / f"samples/flores.{pair}.jsonl").read_text().splitlines()
    ]
    files = folder / f"{pair}.target", folder / f"{pair}.extracted"
    for file in files:
        file.write_text("".join(sample[file.suffix[1:]] + "\n" for sample in samples))
    return files


def sacrebleu(files: tuple[Path, Path], *words: str, **environment: str) -> float:
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        str(files[0]),
        "-i",
        str(files[1]),
        "-b",
        "-w",
        "9",
        *words,
    ]
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, sys.path)
    )  # sees the packages that we do
    told = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert told.returncode == 0, told.stderr
    return float(told.stdout)


def test_bleu_and_chrf_are_sacrebleus(world: Path, tmp_path: Path) -> None:
    outcome = made(table(tmp_path, world), f"runs_dir={tmp_path}/runs")
    for pair in PAIRS:
        files = sides(outcome, pair, tmp_path)
        cells = {
            column: cells_of(outcome)[pair, column].value for column in ("bleu", "chrf", "plain")
        }
        assert cells["bleu"] == pytest.approx(sacrebleu(files, "-m", "bleu"), abs=1e-6)
        chrf = sacrebleu(files, "-m", "chrf", "--chrf-word-order", "2")
        assert cells["chrf"] == cells["plain"] == pytest.approx(chrf, abs=1e-6)
        missing = cells_of(outcome)[pair, "spbleu"]
        assert missing.value is None and "has no spbleu of" in missing.missing
        assert "give every.eval.spm_model=FILE" in missing.missing


@pytest.mark.spbleu
def test_spbleu_is_sacrebleus(world: Path, tmp_path: Path) -> None:
    """Another model, trained on these sentences, is in the place of sacrebleu's download."""
    import sentencepiece

    text = tmp_path / "text"
    files = sorted(path for path in (world / "flores").rglob("*") if path.is_file())
    text.write_text("".join(path.read_text(encoding="utf-8") for path in files), encoding="utf-8")
    (tmp_path / "models").mkdir()
    spm_model = tmp_path / "models/flores200sacrebleuspm"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=80,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "spm.model").rename(spm_model)
    outcome = made(
        table(tmp_path, world), f"runs_dir={tmp_path}/runs", f"every.eval.spm_model={spm_model}"
    )
    for pair in PAIRS:
        files = sides(outcome, pair, tmp_path)
        theirs = sacrebleu(files, "-m", "bleu", "-tok", "flores200", SACREBLEU=str(tmp_path))
        assert cells_of(outcome)[pair, "spbleu"].value == pytest.approx(theirs, abs=1e-6)
        assert theirs != pytest.approx(cells_of(outcome)[pair, "bleu"].value, abs=1e-6)
