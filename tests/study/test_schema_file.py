"""docs/table.schema.json.

What editors check tables and studies by, against jsonschema and every shipped table.
"""

import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from reader import PAGES, blocks
from script_modules import load_script

from pipeline.config import conf

SCRIPT = load_script("make_schema")
CHECKER = Draft202012Validator(json.loads(SCRIPT.FILE.read_text(encoding="utf-8")))
TABLES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (conf.folder() / "tables").glob("*.yaml")
}
PRINTED = {
    f"{page.name}: {block.info}": block.text
    for page in PAGES
    for block in blocks(page)
    if block.language == "yaml" and {"runs", "experts"} & set(yaml.safe_load(block.text) or ())
}


def problems(text: str) -> list[str]:
    return [error.message for error in CHECKER.iter_errors(yaml.safe_load(text))]


def test_the_file_is_what_the_configuration_says() -> None:
    assert json.loads(SCRIPT.FILE.read_text(encoding="utf-8")) == SCRIPT.document()


@pytest.mark.parametrize("name", [*TABLES, *PRINTED])
def test_shipped_and_printed_tables_and_studies_are_valid(name: str) -> None:
    assert problems((TABLES | PRINTED)[name]) == []


STUDY = (
    "experts: {math: ./a, sw: {run: ./b, side: language}}\nlanguages: [sw]\nbenchmarks:"
    " [mgsm_2shot]\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STUDY, None),
        (STUDY.replace("[mgsm_2shot]", "[mgsm_2shot, {eval: gsm8k_5shot, data_root: null}]"), None),
        (
            STUDY.replace("[mgsm_2shot]", "[{eval: gsm8k_5shot}]"),
            "is not valid under any of the given schemas",
        ),
        (STUDY + "method: [soup]\n", "'method' was unexpected"),
        (STUDY.replace("side: language", "side: lang"), "not valid"),
        (STUDY.replace("languages", "language"), "'languages' is a required property"),
        (STUDY.partition("\n")[2], "'experts' is a required property"),
        ("name: a\nruns: {a: {stage: stf}}\ncolumns: {a: a}\n", "'stf' is not one of"),
        ("name: a\nrows: {a: a}\nrun: {}\n", "'run' was unexpected"),
        (
            "name: a\nruns: {a: {stage: sft, sft.batch_size: 0}}\n",
            "is not valid under any of the given schemas",
        ),
        ("name: a\nruns: {a: {stage: sft, sft.batch_size: '{size}'}}\n", None),
    ],
)
def test_mistakes_are_found(text: str, said: str | None) -> None:
    found: Any = problems(text)
    assert found == [] if said is None else any(said in one for one in found), found
