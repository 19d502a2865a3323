"""From words to a stage.

Each option composes, and each mistake is one sentence that says what would be right.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Patch
from tiny_words import WORLD

from pipeline.config import conf
from pipeline.config.compose import compose, stage_of
from pipeline.config.data import Source
from pipeline.config.explain import validated
from pipeline.config.overrides import sweep_jobs
from pipeline.extras.mergekit import Mergekit
from pipeline.merge.methods import METHODS

HEAVY = ("torch", "transformers", "trl", "datasets", "lm_eval", "wandb")
EXPERTS = ["merge.experts=[a,b]"]  # of a merge, but for:
RUNS = {
    "layer_swap": ["merge.math=a", "merge.language=b"],
    "adaptive_swap": ["merge.math=a", "merge.language=b"],
    "reset": ["merge.expert=a", "merge.layers=[0]"],
    "mergekit": ["merge.file=a.yaml", "merge.experts=[a,b]"],
}
SFT = "stage=sft expert=math "
# a group -> the words of a stage that reads it; a new group is told here which stage that is
READ_IN = {
    "model": [SFT, "stage=cpt expert=gsm8k_text "],
    "expert": ["stage=data ", "stage=sft "],
    "sft": [SFT, "stage=cpt expert=gsm8k_text "],
    "partition": [
        SFT + "sft=partial",
        "stage=cpt expert=bn",
        "stage=merge merge=reset merge.expert=a merge.side=math",
    ],
    "recipe": [SFT, "stage=cpt expert=gsm8k_text "],
    "merge": ["stage=merge ", "stage=eval eval=mgsm_2shot "],
    "eval": ["stage=eval checkpoint=x "],
    "select": ["stage=select checkpoints=[x] "],
    "mixture": [SFT, "stage=data expert=math ", "stage=cpt expert=gsm8k_text "],
    "launcher": [SFT, "stage=status "],
    "hardware": [SFT, "stage=cpt expert=gsm8k_text ", "stage=plan ", "stage=table "],
    "tracking": [SFT, "stage=status "],
    "data": [],  # brought by an expert: below
    "stage": [],  # each of the others: below
}
STAGE_WORDS = {
    "data": "expert=math",
    "cpt": "expert=gsm8k_text",
    "sft": "expert=math",
    "eval": "eval=mgsm_2shot checkpoint=x",
    "merge": "merge=soup merge.experts=[a,b]",
    "analyze": "checkpoint=x",
    "plan": "",
    "table": "",
    "report": "",
    "status": "",
    "prefetch": "",
    "check": "",
    "select": "select=unreasonable checkpoints=[x]",
    "compare": "results=[a,b]",
    "clean": "",
    "show": "run=x",
    "export": "table=sandbox export.to=x.zip",
}


@pytest.mark.parametrize(
    ("group", "option"), [(one, option) for one in conf.groups() for option in conf.options(one)]
)
def test_every_option_composes_in_the_stages_that_read_it(group: str, option: str) -> None:
    for words in READ_IN[group]:
        more = (
            RUNS.get(option, EXPERTS)
            if group == "merge"
            else ["model.path=x"]
            if option == "trained"
            else []
        )
        more += (
            ["partition.bottom_layers=4", "partition.top_layers=2"]
            if (group, option) == ("partition", "own")
            else []
        )
        assert compose([*words.split(), f"{group}={option}", *more])


@pytest.mark.parametrize("option", conf.options("data"))
def test_every_dataset_is_a_source(option: str) -> None:
    (words,) = conf.option("data", option).values()
    validated(Source, words)


@pytest.mark.parametrize("stage", conf.options("stage"))
def test_every_stage_composes_and_is_its_dataclass(stage: str) -> None:
    found = compose([f"stage={stage}", *STAGE_WORDS[stage].split()])
    assert type(found) is conf.stage_class(stage) and found.stage == stage


def test_every_merge_method_has_an_option() -> None:
    assert {conf.method_of(option) for option in conf.options("merge")} == {
        *METHODS.values(),
        Mergekit,
    }


def test_no_words_are_the_demo() -> None:
    demo = compose([])
    assert (demo.stage, demo.table) == ("table", "sandbox")  # type: ignore[attr-defined]


EVAL = "stage=eval eval=mgsm_2shot checkpoint=x "
SOUP = "stage=merge merge=soup "
SELECT = "stage=select select=unreasonable checkpoints=[a] "
REFUSED = {
    # a wrong option
    "stage=xyz": "stage=xyz is not an option: there are analyze, clean, compare, cpt, data,",
    "stage=sft expret=math": "unknown key expret: did you mean expert",
    "stage=merge merg=ties": "unknown key merg: did you mean merge",
    "stage=sft expert=mth": "expert=mth is not an option: did you mean math",
    "stage=sft": "stage=sft needs expert=... Choose from bn,",
    "stage=eval checkpoint=x": "stage=eval needs eval=... Choose from belebele_0shot,",
    "stage=merge merge=tie": "merge=tie is not an option: did you mean ties",
    "stage=merge merge=swap": "merge=swap is not an option: did you mean layer_swap",
    "stage=sft expert=[math,qac]": "expert=[math,qac] is not an option. Choose from bn,",
    SFT + "sft=null": "sft=null is not an option. Choose from full",
    SFT + "partition=D": (
        "there are A, B, C, Z, own. Or write partition/D.yaml in DIR and give --config-dir=DIR"
    ),
    SFT + "partition.bottom_layers=3": (
        "partition.bottom_layers needs partition=... Choose from A, B, C, Z, own"
    ),
    SFT + "partition=own": "stage=sft needs partition.bottom_layers",
    SFT + "partition=A partition.bottom=3": (
        "unknown key partition.bottom: did you mean partition.bottom_layers"
    ),
    "table=nope": "table=nope is not a table: there are adaptive_swap, calibrate,",
    "table=sandbax": "table=sandbax is not a table: did you mean sandbox",
    SFT + "every.sft.steps=2": "unknown key every.sft.steps: stage=sft reads",
    "every.sft.stops=2": (
        "sandbox.yaml, run 'math expert': unknown key sft.stops: did you mean sft.steps"
    ),
    "every.moddel=x": "sandbox.yaml, every: no stage has a key moddel: did you mean model",
    "plan.gpu=h100": "unknown key plan.gpu: stage=table reads",
    # a group that the stage does not read
    SFT + "merge=soup": (
        "stage=sft does not read merge=soup. Remove it. It reads model, expert, sft, partition,"
    ),
    EVAL + "sft=full": (
        "stage=eval does not read sft=full. Remove it. It reads merge, partition, eval,"
    ),
    "expert=math": (
        "stage=table does not read expert=math. Set every.expert=math for the runs of the table,"
        " or remove"
    ),
    # an unknown key, with + too
    "stage=eval languages=[en, sw]": "Quote a value with brackets, braces, spaces or =, for",
    SFT + "+sft.learning_rat=1": "unknown key sft.learning_rat: did you mean sft.learning_rate?",
    SFT + "learning_rate=1e-4": "unknown key learning_rate: did you mean sft.learning_rate?",
    SFT + "lr=1e-4": ("unknown key lr: there are data, data_root,"),
    "stage=merge merge=ties merge.experts=[a,b] merge.method=soup": (
        "merge.method=soup: merge=ties already sets the method"
    ),
    "stage=merge merge=ties merge.experts=[a,b] merge.fewest=3": (
        "unknown key merge.fewest: there are base, control,"
    ),
    "stage=data expert=sandbox expert.world.dev_items=3": (
        "expert.world.dev_items: did you mean expert.world.items?"
    ),
    SFT + "model=org/name": "model.path=org/name is not a folder of ",
    SOUP + "merge.experts=[a,b] +merge.density=1": "unknown key merge.density: there are",
    SELECT + "select.primary=[{tusk:mgsm}]": (
        "unknown key select.primary.0.tusk: did you mean select.primary.0.task?"
    ),
    "stage=data expert=sw expert.world.items=3": (
        "expert.world.items: this option has no world. Remove it"
    ),
    "stage=data expert=math expert.sources={a:{hub:x}}": (
        "expert.sources.a is new. Add it with a plus"
    ),
    # a wrong type
    SFT + "sft.learning_rate=fast": "sft.learning_rate must be a number, got 'fast'",
    SFT + "seed=1.5": "seed must be a whole number, got 1.5",
    SFT + "seed=null": "seed=null: give a value, null is not allowed",
    SFT + "sft.steps=": "sft.steps must be a whole number, got ''",
    SFT + "sft.separator=[1]": "sft.separator must be text, got [1]",
    SFT + "model.architecture=3": (
        "model.architecture=3: it is a mapping, give model.architecture.KEY=..."
    ),
    EVAL + "languages=en": "languages=en: write a list, languages=[en]",
    "every.seed=a": "sandbox.yaml, run 'world': seed must be a whole number, got 'a'",
    # a wrong value
    "stage=merge merge=ties merge.experts=[a,b] merge.density=1.5": (
        "merge.density must be above 0 and at most 1, got"
    ),
    # a missing value, or a RUN that is none
    "stage=eval eval=mgsm_2shot": "stage=eval needs checkpoint=RUN or merge=METHOD",
    "stage=select select=unreasonable": (
        "stage=select needs checkpoints. Write checkpoints=[RUN,RUN]"
    ),
    "stage=select checkpoints=[a]": (
        "stage=select needs select=... Choose from layer_swapping_language,"
    ),
    "stage=select select=unreasonable checkpoints=[a]": (
        "checkpoints=a is not a finished run of runs"
    ),
    "stage=select select=unreasonable checkpoints=[a] select.place=0": (
        "select.place must be at least 1, got 0"
    ),
    "stage=merge merge=layer_swap": (
        "needs merge.language and merge.math. Write merge.language=RUN merge.math=RUN"
    ),
    SOUP: "stage=merge needs merge.experts. Write merge.experts=[RUN,RUN]",
    EVAL: "checkpoint=x is not a finished run of runs: there are none",
    "stage=eval eval=mgsm_2shot checkpoint=/no/where": ("checkpoint=/no/where is not a folder of "),
    "stage=eval eval=mgsm_2shot checkpoint=hub:": (
        "checkpoint=hub: is not a model on the Hub. Write hub:org/name"
    ),
    SOUP + "merge.experts=[a]": "merge.experts=['a']: too few runs. Name at least 2",
    SFT + "model=trained": "model.path=RUN",
    SFT + "model=sandbox_random": "model.tokenizer=data_root needs data_root",
    "stage=data expert=own": (
        "expert.sources.own.prompt=None names no columns. Set expert.sources.own.prompt="
    ),
    "stage=data expert=own expert.sources.own.language=klingon": "unknown language 'klingon': ",
    "stage=sft expert=own expert.sources.own.rows=poems": "expert.sources.own.rows must be one of ",
    "stage=data expert=math data_root=/no/where": "data_root=/no/where is not a folder",
    # what nothing reads, and what is given twice
    SFT + "sft.lora_rank=4": (
        "sft.lora_rank=4 has an effect with sft=lora, partial_lora, mixed_lora or simultaneous_"
    ),
    SFT
    + "sft.steps_per_switch=2": "sft.steps_per_switch=2 has an effect with sft=simultaneous only",
    SFT
    + "model=./x model.revision=v2": "model.revision=v2 has an effect with model=hub:org/name only",
    EVAL + "eval.template_date=2024-13-45": (
        "eval.template_date=2024-13-45 has an effect with eval.chat_template=true only"
    ),
    EVAL + "eval.spm_model=x": "eval.spm_model=x has an effect with eval=flores_Nshot only",
    "stage=eval eval=mgsm_0shot checkpoint=x eval.exemplars=random": (
        "has an effect with a task with exemplars, eval=TASK_N"
    ),
    "-m " + SFT + "seed=0,1 sft.lora_rank=4": "sft.lora_rank=4 has an effect with sft=lora,",
    SFT + "launcher.partition=gpu": (
        "launcher.partition=gpu has an effect with launcher=slurm only. Set launcher=slurm"
    ),
    SFT + "launcher=slurm launcher.time=soon": (
        "launcher.time=soon is not of the form 24:00:00 or 2-12"
    ),
    SFT + "seed=1 seed=2": "seed is set twice, to 1 and 2. Set it once",
    "every.seed=1 every.seed=2": "every.seed is set twice, to 1 and 2. Set it once",
    "stage=plan " + SFT: (
        "stage is set twice, to plan and sft. Set it once, or plan.stage=STAGE to plan one command"
    ),
    "stage=plan every.deterministic=7": "deterministic must be true or false, got 7",
    # interpolations, which could carry a token of the environment into manifests
    SFT + "group=${oc.env:HOME}": "group holds an interpolation, ${...}. Write the value",
    "every.group=${oc.env:HOME}": "every.group holds an interpolation",
    SOUP + "merge.experts={}": "merge.experts={}: write a list, merge.experts=[",
    "stage=eval checkpoint=x ++eval=belebele_0shot": (
        "++eval=belebele_0shot: choose an option without a plus: eval"
    ),
    "stage=merge +merge=layer_swap": (
        "+merge=layer_swap: choose an option without a plus: merge=layer_swap"
    ),
    "stage=merge merge=task_arithmetic merge.scale=~": ("is not an override. Write key=value"),
    # hardware and exports
    "stage=sft expert=sw hardware=a100_80": "did you mean a100_80x8 or a100_80x1",
    "stage=sft expert=sw hardware=": ("there are a100_40x1, a100_40x8, a100_80x1, a100_80x8, cpu,"),
    "stage=clean hardware=cpu": (
        "stage=clean does not read hardware=cpu. Remove it. It reads tracking, launcher"
    ),
    SFT + "hardware=a100_80x8 sft.processes=8": (
        "sft.batch_size=4 is not a multiple of sft.micro_batch_size=1 x "
        "sft.processes=8. Give sft.batch_size=8"
    ),
    "stage=export checkpoint=x": ("stage=export needs export.to. Set export.to=./DIR."),
    "stage=export checkpoint=x table=sandbox export.to=y": ("needs table=T or checkpoint=RUN"),
    "stage=export table=sandbox export.to=y export.adapter=true": (
        "export.dtype, export.adapter and export.licence apply"
    ),
    "stage=export checkpoint=x export.to=y export.dtype=int8": (
        "export.dtype must be one of float32, bfloat16, float16"
    ),
    "stage=export checkpoint=x export.to=y export.adapter=true export.dtype=bfloat16": (
        "export.dtype=bfloat16 would round "
        "the float32 values that export.adapter=true writes exactly. Remove one of the two"
    ),
    "stage=export checkpoint=x export.to=y data_root=z": (
        "every, data_root and table.free_snapshots apply to table=T"
    ),
    # no key=value at all
    "expert": "'expert' is not an override. Write key=value",
    "launcher.options=[--constraint=a100,-x]": (
        "Quote a value with brackets, braces, spaces or =, for example"
    ),
    "expert.sources.own.prompt={q}": "Quote a value with brackets, braces, spaces or =",
    "launcher.options=[--a=b": "'launcher.options=[--a=b' is not an override. Write key=value",
    SFT + "~seed": "'~seed' removes a required key. Write seed=value",
    SFT + "seed=0,1": (
        "seed=0,1 has several values. -m starts a run for each; a list is seed=[...]"
    ),
    SFT + "hydra.run.dir=/x": "Hydra's own settings are read with -m only",
    "stage=sft expert=math sft.padding_free=true": (
        "sft.padding_free was removed in 0.2.0: the rows of a step are sorted by length"
    ),
    "stage=export table=sandbox export.to=x export.format=lm_eval": (
        "export.format=lm_eval was removed in 0.2.0: answers.parquet and results.csv"
    ),
    "stage=export table=sandbox export.to=x export.format=figures": (
        "export.format=figures was removed in 0.2.0: the folder of the report has plots"
    ),
    "stage=export table=sandbox export.to=x export.format=csv": (
        "export.format=csv was removed in 0.2.0: the folder of the report has cells.csv"
    ),
    "stage=report table=sandbox report.fewer=true": (
        "report.fewer was removed in 0.2.0: stage=report always writes"
    ),
    "stage=search merge=soup": "stage=search was removed in 0.2.0: choose with best: in a table",
    "stage=sweep merge=soup": (
        "stage=sweep was removed in 0.2.0: give a table an axis for each knob"
    ),
    "stage=eval checkpoint=x eval=xcopa": (
        "eval=xcopa was removed in 0.2.0: name the task of each language"
    ),
    "stage=eval checkpoint=x eval=xcopa_0shot": "eval=xcopa was removed in 0.2.0: name the task",
    "stage=eval checkpoint=x eval=afrimgsm_2shot": "eval=afrimgsm was removed in 0.2.0: name the",
    "stage=merge merge=soup sweep.layers=2": "stage=sweep was removed in 0.2.0: give a table",
    "search.trials=5": "stage=search was removed in 0.2.0: choose with best: in a table",
    "stage=sft expert=sandbox_text_last": (
        "expert=sandbox_text_last was removed in 0.2.0: recipe=sandbox_language"
    ),
    "stage=eval checkpoint=x eval=mmlu_prox": (
        "eval=mmlu_prox was removed in 0.2.0: name the task of each"
    ),
    "stage=merge merge=ties_mergekit": (
        "merge=ties_mergekit was removed in 0.2.0: merge=mergekit runs any method"
    ),
    "stage=merge merge=ties merge.trim=tensor": (
        "merge.trim was removed in 0.2.0: merge=ties trims the whole model"
    ),
    "-m stage=sft expert=mth,math": "expert=mth is not an option: did you mean math",
    "-m stage=sft expert=math seed=0,-1": "seed must be at least 0 and at most 4294967295, got -1",
    **{
        f"stage={stage} {STAGE_WORDS[stage]} seed={seed}": (
            f"seed must be at least 0 and at most 4294967295, got {seed}"
        )
        for stage in ("data", "cpt", "sft", "merge", "eval", "select", "analyze")
        for seed in (2**32, -1)
    },
    "stage=plan every.sft.batch_size=0": (
        "sandbox.yaml, run 'math expert': sft.batch_size must be at least 1, got 0"
    ),
}


TELL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from pipeline.__main__ import main

def tell(words):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(words)
    return [status, out.getvalue(), err.getvalue()]

told = [tell(words) for words in json.loads(sys.argv[1])]
print(json.dumps({"told": told, "imported": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the program says to each mistake, what it imported, and what it left behind.

    All mistakes are made in one fresh process.
    """
    folder = tmp_path_factory.mktemp("refusals")
    asked = json.dumps([words.split() for words in REFUSED])
    command = [sys.executable, "-c", TELL, asked]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    return {
        **found,
        "told": dict(zip(REFUSED, found["told"], strict=True)),
        "left": list(folder.iterdir()),
    }


@pytest.mark.parametrize(("words", "expected"), REFUSED.items(), ids=REFUSED)
def test_a_mistake_is_one_sentence(words: str, expected: str, refusals: dict[str, Any]) -> None:
    status, out, err = refusals["told"][words]
    assert status == 1 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert expected in err


def test_refused_before_anything_heavy_is_imported_or_written(refusals: dict[str, Any]) -> None:
    assert not set(HEAVY) & set(refusals["imported"])
    assert refusals["left"] == []


def test_help_names_every_stage_and_option(call: Call) -> None:
    told = call("--help").out
    assert call("-h").out == told
    lines = {
        line.split()[0]: line.split()[1:]
        for line in told.splitlines()
        if line.startswith("  stage=")
    }
    assert {
        f"stage={stage}": list(conf.stage_class(stage).groups) for stage in conf.options("stage")
    } == lines
    for group in conf.groups():
        assert group in ("stage", "data") or all(
            option in told for option in conf.options(group)
        ), group
    assert max(map(len, told.splitlines())) <= 120


def test_stdout_is_the_folder_alone_and_a_sweep_prints_one_a_job(tmp_path: Path) -> None:
    """In processes of their own: what libraries print goes to standard error."""
    words = ["stage=data", *WORLD, "tracking.mode=disabled", "runs_dir=here"]

    def run(*more: str) -> list[str]:
        command = [sys.executable, "-m", "pipeline", *words, *more]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    (folder,) = run()
    assert (tmp_path / folder / "manifest.json").is_file()
    words.remove("expert.world.items=4")
    again, other = run("-m", "expert.world.items=4,5")
    assert again == folder != other
    assert (tmp_path / other / "manifest.json").is_file()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a folder of options with a space in its name."""
    folder = tmp_path / "my conf"
    (folder / "recipe").mkdir(parents=True), (folder / "tables").mkdir()
    (folder / "recipe/mine.yaml").write_text("# @package sft\nlearning_rate: 3.0e-6\n")
    (folder / "tables/mine.yaml").write_text(
        "name: mine\nevery: {model: llama3.1_8b, recipe: mine, data.size: 1000}\nruns: {math:"
        " {stage: sft, expert: math}}\ncolumns: {math: {run: math, eval: mgsm_2shot, in: en}}\n"
    )
    return folder


def test_a_folder_of_options_of_ones_own(own: Path, call: Call, monkeypatch: Patch) -> None:
    """Its options compose, its tables are found, and error messages name the options of both.

    Hydra's own flags work too.
    """
    sft = "stage=sft expert=math model=llama3.1_8b".split()
    monkeypatch.chdir(own.parent)
    assert (
        "learning_rate: 3.0e-06"
        in call(f"--config-dir={own}", *sft, "recipe=mine", "--cfg", "job").out
    )
    refused = call("--config-dir", "my conf", *sft, "recipe=nope")
    assert refused.status == 1 and refused.err.count("\n") == 1
    assert "recipe=nope is not an option: did you mean mine?" in refused.err
    assert (
        "3 runs, 0 done." in call(f"--config-dir={own}", "stage=plan", "table=mine", status=0).out
    )
    missing = call(f"--config-dir={own}", "stage=plan", "table=min")
    assert "table=min is not a table: did you mean mine" in missing.err


def test_the_package_of_an_option_is_below_other_comments_too(own: Path, call: Call) -> None:
    (own / "recipe/mine.yaml").write_text(
        "# Our recipe.\n\n#\n# @package sft\nlearning_rate: 3.0e-6\n"
    )
    told = call(f"--config-dir={own}", "stage=sft", "expert=math", "recipe=mine", "--cfg", "job")
    assert told.status == 0 and "learning_rate: 3.0e-06" in told.out, told.err


@pytest.mark.parametrize(
    ("defaults", "told"),
    [
        (
            "[nope]",
            "sparser.yaml starts from merge=nope, which is not an option. Choose from adaptive_swap,",
        ),
        ("[sparser]", "sparser.yaml starts from itself. Remove sparser from its defaults"),
    ],
)
def test_what_an_option_cannot_start_from(defaults: str, told: str, own: Path, call: Call) -> None:
    (own / "merge").mkdir()
    (own / "merge/sparser.yaml").write_text(f"defaults: {defaults}\ndensity: 0.1\n")
    refused = call(f"--config-dir={own}", "stage=merge", "merge=sparser", "merge.experts=[a,b]")
    assert refused.status == 1 and told in refused.err and "Traceback" not in refused.err, (
        refused.err
    )


def test_defaults_that_are_no_list_are_refused(own: Path, call: Call) -> None:
    (own / "merge").mkdir()
    (own / "merge/sparser.yaml").write_text("defaults: ties\ndensity: 0.1\n")
    refused = call(f"--config-dir={own}", "stage=merge", "merge=sparser", "merge.experts=[a,b]")
    assert "sparser.yaml: defaults=ties is not a list. Write defaults: [ties]" in refused.err


def test_an_option_of_ones_own_based_on_a_merge_method_has_its_knobs_and_help(
    own: Path, call: Call
) -> None:
    """Whatever its name, and one that starts from another such option."""
    (own / "merge").mkdir()
    (own / "merge/mine.yaml").write_text("defaults: [ties, _self_]\ndensity: 0.3\n")
    (own / "merge/sparser.yaml").write_text("defaults: [mine, _self_]\ndensity: 0.1\n")
    merge = [f"--config-dir={own}", "stage=merge", "merge=sparser"]
    told = call(*merge, "--help")
    assert told.status == 0 and "merge.density=0.1 " in told.out and "merge.scale=" in told.out
    shown = call(*merge, "merge.experts=[a,b]", "--cfg", "job").out
    assert "density: 0.1" in shown and "method: ties" in shown
    wrong = call(*merge, "merge.experts=[a,b]", "merge.densty=0.2").err
    assert "unknown key merge.densty: did you mean merge.density?" in wrong


def test_an_interpolation_in_a_folder_of_options_is_refused(
    own: Path, tmp_path: Path, call: Call
) -> None:
    """Resolved, a token of the environment would be in train.jsonl, manifests and W&B."""
    (own / "expert").mkdir()
    file = own / "expert/mine.yaml"
    file.write_text(
        "name: mine\nside: math\nsources: {a: {file: a.jsonl, rows: template, prompt:"
        " '${oc.env:HOME}'}}\n"
    )
    told = call(f"--config-dir={own}", "stage=data", "expert=mine", f"data_root={tmp_path}")
    assert (
        told.status == 1
        and told.err == f"error: {file} holds an interpolation, ${{...}}. Write the value.\n"
    )


def test_claims_of_ones_own(own: Path, call: Call) -> None:
    """DIR/claims is read with the shipped claims, and names are checked before any run begins."""
    (own / "claims").mkdir()
    claim = (
        "mine: [{id: mine_is_good, text: Mine is good., section: none, left: math, right: base,"
        " metric: exact_match, over: [all], test: difference, threshold: 5, direction: higher}]\n"
    )
    (own / "claims/mine.yaml").write_text(claim.replace("right: base", "right: bse"))
    (own / "tables/mine.yaml").write_text(
        "name: mine\nevery: {model: sandbox, data_root: world}\nrows: {all: {}}\nscore: {eval:"
        " mgsm_0shot, in: en}\nruns:\n  world: {stage: data, expert: sandbox}\n  base: {}\n  math:"
        " {stage: sft, expert: math, recipe: sandbox_math}\ncolumns: {base: base, math: math}\n"
    )
    asked = [f"--config-dir={own}", "stage=plan", "table=mine"]
    assert "mine.yaml, claim mine_is_good: 'bse' is no column or row" in call(*asked, status=1).err
    (own / "claims/mine.yaml").write_text(claim)
    call(*asked)
    (own / "claims/mine.yaml").write_text(claim.replace("}]", "}, {id: mine_is_good}]"))
    assert "claim mine_is_good: text=: Field required" in call(*asked).err


def test_a_folder_that_would_be_misread_is_refused(own: Path, call: Call) -> None:
    asked = [f"--config-dir={own}", "stage=plan"]
    assert (
        call("--config-dir=nowhere", "stage=plan").err
        == "error: --config-dir=nowhere does not exist. Name a folder with options such as"
        " recipe/mine.yaml or tables/mine.yaml.\n"
    )
    assert (
        "pyproject.toml is a file and not"
        in call(f"--config-dir={conf.folder().parent}/pyproject.toml").err
    )
    assert "--config-dir needs a folder" in call("stage=plan", "--config-dir").err
    (own / "table").mkdir()
    assert "table/ is not a group of options: did you mean tables/?" in call(*asked).err
    (own / "table").rename(own / "model")
    (own / "model/sandbox.yaml").write_text("name: sandbox\n")
    assert "model=sandbox exists already. Choose another name" in call(*asked).err
    assert conf.folders() == (conf.folder(),)


@pytest.mark.parametrize(
    "checkpoint", ["hub:org/name", "./folder", "../folder", "/there/folder", "package:data/x"]
)
def test_model_takes_a_checkpoint_without_a_file_of_its_own(checkpoint: str) -> None:
    """A checkpoint is allowed on the command line and in a table, alone or among several."""
    short, longer = (
        compose(["stage=sft", "expert=math", f"model={checkpoint}"]),
        ["stage=sft", "expert=math"],
    )
    assert short == compose([*longer, "model=trained", f"model.path={checkpoint}"])
    assert short == stage_of({"stage": "sft", "expert": "math", "model": checkpoint})
    both = [compose(job).model.path for job in sweep_jobs([*longer, f"model={checkpoint},./b"])]  # type: ignore[attr-defined]
    assert both == [checkpoint, "./b"]
