"""Languages by their codes.

The shipped ones against langcodes and the harness, a user's own, and refusals.
"""

import json
from pathlib import Path

import pytest
import yaml
from fixture_types import Call, Patch
from script_modules import load_script

from pipeline.benchmarks import benchmark_of
from pipeline.config import conf
from pipeline.config.compose import compose
from pipeline.config.evaluation import Eval, EvalTask
from pipeline.data.benchmarks import hub_sources
from pipeline.errors import PipelineError
from pipeline.evaluate.tasks import task_specs
from pipeline.files import ADDED_CONF
from pipeline.languages import GROUP, MGSM, language, shipped_languages
from pipeline.stages.rows import build


def test_the_codes_of_one_language() -> None:
    swahili = language("sw")
    assert (swahili.name, swahili.flores, swahili.aya, swahili.stock) == (
        "Swahili",
        "swh_Latn",
        "Swahili",
        "sw",
    )
    assert swahili.aya_codes == ("swh", "swa")
    assert language("zh").aya == "Simplified Chinese" and language("zh_hant").flores == "zho_Hant"


def test_the_shipped_ones_are_belebeles_and_mgsms() -> None:
    """Held against what langcodes and the harness say today.

    Names, tags, scripts, and a stock task for each.
    """
    made = load_script("make_languages")
    wanted = made.languages()
    assert yaml.safe_load((conf.folder() / "languages.yaml").read_text(encoding="utf-8")) == wanted
    assert len(wanted) == 122 and set(MGSM) <= set(wanted)
    found = list(shipped_languages().values())
    assert len({one.flores for one in found}) == 122 and all(one.scripts[0] for one in found)


# FLORES+'s configurations on the Hub
FLORES_PLUS = Path(__file__).with_name("flores_plus.txt").read_text(encoding="utf-8").split()


def test_sets_of_the_hub_are_those_that_it_has(tmp_path: Path) -> None:
    """Of each language and benchmark: the harness' stock files and FLORES+'s list say which."""
    for spoken in shipped_languages().values():
        codes = {one.hub_config for one in benchmark_of("flores").sources(spoken)}
        assert codes <= set(FLORES_PLUS) and (codes or spoken.code.endswith("_latn")), spoken.code
    without = [
        spoken
        for spoken in shipped_languages().values()
        if not benchmark_of("flores").sources(spoken)
    ]
    assert {one.flores for one in without} == {
        "ben_Latn",
        "hin_Latn",
        "npi_Latn",
        "sin_Latn",
        "urd_Latn",
    }
    with pytest.raises(PipelineError, match="Leave hi_latn out of languages"):
        task_specs(Eval("", [EvalTask("flores", 0)]), ["hi_latn"], None, tmp_path)


def test_training_rows_are_compared_with_the_benchmarks_of_the_experts_language() -> None:
    def added(code: str) -> set[tuple[str, str | None]]:
        known = [(name, source.hub_config) for name, source in hub_sources()]
        return {(name, source.hub_config) for name, source in hub_sources([code])} - {*known}

    assert added("ha") == {("belebele", "hau_Latn"), ("flores", "hau_Latn"), ("global_mmlu", "ha")}
    assert added("fil") == {
        ("belebele", "tgl_Latn"),
        ("flores", "fil_Latn"),
        ("global_mmlu", "fil"),
    }
    assert added("hi_latn") == {("belebele", "hin_Latn")} and added("sw") == added("qac") == set()
    expert = compose(
        ["stage=data", "expert=own", "expert.sources.own.language=ha", "data_root=null"]
    ).expert
    assert expert.languages == ["ha"]


@pytest.mark.parametrize(
    ("code", "near"),
    [
        ("swa", "sw (Swahili)"),
        ("Telugo", "te (Telugu)"),
        ("qua", ""),
        ("tel_telu", "te"),
        ("zh-CN", "zh (Chinese)"),
        ("Deutsch", "de (German)"),
        ("pt_BR", "pt (Portuguese)"),
        ("", "CODE.yaml"),
        ("../sw", ""),
    ],
)
def test_an_unknown_language_is_refused_with_near_ones_and_how_to_add_it(
    code: str, near: str
) -> None:
    with pytest.raises(PipelineError, match=f"unknown language '{code}'") as caught:
        language(code)
    assert near in str(caught.value) and "give --config-dir=DIR" in str(caught.value)


OWN = "name: Kupsabiny\nflores: kpz_Latn\nscripts: [LATIN]\n"
ANSWERS = {f"mc_answer{n}": "abcd"[n - 1] for n in (1, 2, 3, 4)}
QUESTION = (
    json.dumps({"flores_passage": "p", "question": "q", **ANSWERS, "correct_answer_num": "1"})
    + "\n"
)


def test_a_language_of_ones_own_is_scored_and_decides_the_hash(
    tmp_path: Path, base: Path, monkeypatch: Patch
) -> None:
    """Its rows below data_root, as any language's.

    Another field is another run, and a shipped one adds nothing.
    """
    (tmp_path / "conf/language").mkdir(parents=True)
    file = tmp_path / "conf/language/kpz.yaml"
    monkeypatch.setenv(ADDED_CONF, str(tmp_path / "conf"))
    data = tmp_path / "data/belebele"
    for code in ("kpz", "sw"):
        (data / code).mkdir(parents=True)
        (data / code / "test.jsonl").write_text(QUESTION * 3)
    hashes = {}
    for text in (OWN, OWN.replace("Kupsabiny", "Sabiny"), OWN + "\n# a remark\n"):
        file.write_text(text)
        for code in ("kpz", "sw"):
            words = [
                f"checkpoint={base}",
                "eval=belebele_0shot",
                f"languages=[{code}]",
                f"data_root={tmp_path}/data",
            ]
            run = build(compose(["stage=eval", f"runs_dir={tmp_path}/runs", *words]))  # type: ignore[arg-type]
            hashes[text, code] = run.hash
            assert ("language kpz" in run.parents) == (code == "kpz")
    assert len({found for (_, code), found in hashes.items() if code == "sw"}) == 1
    own = [found for (_, code), found in hashes.items() if code == "kpz"]
    assert own[0] == own[2] != own[1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: Kupsabiny\n", "must have name and flores"),
        (
            OWN + "script: LATIN\n",
            "script='LATIN': Unexpected keyword argument. The fields are aya, aya_codes, flores",
        ),
        (OWN.replace("[LATIN]", "LATIN"), "scripts='LATIN': Input should be a valid tuple"),
        (OWN.replace("Kupsabiny", "no"), "name=False: Input should be a valid string"),
        ("[", "kpz.yaml, line 1: invalid YAML"),
    ],
)
def test_a_bad_file_is_one_sentence(
    text: str, sentence: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / GROUP).mkdir()
    (tmp_path / GROUP / "kpz.yaml").write_text(text)
    monkeypatch.setenv(ADDED_CONF, str(tmp_path))
    with pytest.raises(PipelineError) as caught:
        language("kpz")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_worker_knows_the_languages_of_config_dir(call: Call, tmp_path: Path, base: Path) -> None:
    """A table's runs are made by processes of their own.

    The harness has Swahili, by its code in FLORES.
    """
    (tmp_path / "mine/language").mkdir(parents=True)
    (tmp_path / "mine/language/swx.yaml").write_text(OWN.replace("kpz_Latn", "swh_Latn"))
    (tmp_path / "data/belebele/swx").mkdir(parents=True)
    (tmp_path / "data/belebele/swx/test.jsonl").write_text(QUESTION)
    (tmp_path / "own.yaml").write_text(
        f"name: own\nevery: {{data_root: {tmp_path}/data}}\nruns: {{base: {{checkpoint:"
        f" {base}}}}}\nscore: {{eval: belebele_0shot}}\ncolumns: {{base: base}}\nrows: {{swx: {{in:"
        " swx}}\n"
    )
    words = [
        f"--config-dir={tmp_path}/mine",
        "stage=table",
        f"table={tmp_path}/own.yaml",
        f"runs_dir={tmp_path}/runs",
    ]
    call(*words, "launcher.workers=2", "tracking.mode=disabled", status=0)
    (scores,) = (tmp_path / "runs").glob("*/scores.json")
    assert json.loads(scores.read_text())["rows"][0]["language"] == "swx"
    assert (tmp_path / "runs/.logs").is_dir()  # where workers write
