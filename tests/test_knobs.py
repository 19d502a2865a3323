"""Every hashed knob of training, merging and evaluation changes results, or is refused by name.

The tables below hold each hashed field of the configuration: a new knob fails
`test_every_hashed_knob_is_listed` until it says here what shows its effect. What is read in some
contexts alone is changed outside of them too: there it must not enter the hash, or be refused. What
rightly changes no bits says why.
"""

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixture_types import Make
from safetensors.torch import load_file

from pipeline.config.compose import stage_of
from pipeline.config.evaluation import Eval, EvalTask
from pipeline.config.merging import Merge
from pipeline.config.overrides import values_of
from pipeline.config.stages import EvalStage, MergeStage, TrainStage
from pipeline.config.training import Model, Partition, Sft
from pipeline.errors import PipelineError
from pipeline.launch.launchers import make_single_run
from pipeline.merge.methods import METHODS

BASE = Path(__file__).parents[1] / "src/pipeline/data/sandbox_base"


@dataclass(frozen=True)
class Change:
    """Words that change a knob. `given`: the context that reads it; `refused`.

    Part of the error that it raises.
    """

    words: str
    given: str = ""
    refused: str = ""
    same_because: str = ""  # no bits change but by rounding, and why
    alone_because: str = (
        ""  # why it is hashed outside of its context, though it may change nothing there
    )


OWN = "partition=own partition.bottom_layers=1 partition.top_layers=1"
PARTIAL = f"sft=partial sft.side=language {OWN}"
JOINT = f"expert=math_qac sft=simultaneous data.size=16 {OWN}"
CHAT = "sft.template=chat"
VALIDATED = "data.validation=4"
SNAPSHOTS = "sft.snapshot_every=4 data.validation=4 data.size=16"
RANDOM = "model=sandbox_random model.architecture.num_hidden_layers=2"
TRAINING: dict[str, Change | list[Change]] = {
    "seed": Change("seed=1"),
    "deterministic": Change(
        "deterministic=true", same_because="torch's other kernels, which differ on a GPU alone"
    ),
    "model.revision": Change(
        "model.revision=v2", same_because="of a folder nothing is fetched, and it is not hashed"
    ),
    "model.init": Change(RANDOM),
    "model.architecture": Change("+model.architecture.hidden_act=gelu", given=RANDOM),
    "model.tokenizer": Change("model.tokenizer=bpe sft.seq_length=1024", given=RANDOM),
    "model.vocab_size": Change(
        "model.vocab_size=270", given=f"{RANDOM} model.tokenizer=bpe sft.seq_length=1024"
    ),
    "model.attn_implementation": Change(
        "model.attn_implementation=eager", same_because="in another order"
    ),
    "sft.method": Change(PARTIAL),
    "sft.adapter": Change("sft.adapter=lora"),
    "sft.side": Change("sft.side=math", given=PARTIAL),
    "sft.steps_per_switch": Change("sft.steps_per_switch=2", given=JOINT),
    "sft.learning_rate": Change("sft.learning_rate=2e-3"),
    "sft.batch_size": Change("sft.batch_size=2"),
    "sft.micro_batch_size": Change(
        "sft.micro_batch_size=2",
        same_because="a step has the same rows and the same mean; they are summed in parts",
    ),
    "sft.processes": Change("sft.processes=2", same_because="see test_two_processes_equal_one"),
    "sft.parallel": Change(
        "sft.parallel=fsdp2", same_because="of one process not hashed; of several refused on a CPU"
    ),
    "sft.seq_length": Change("sft.seq_length=40"),
    "sft.packing": Change(
        "sft.packing=false", given="stage=cpt expert=sandbox_text sft.packing=true"
    ),
    "sft.epochs": Change("sft.epochs=2"),
    "sft.steps": Change("sft.steps=1"),
    "sft.optimizer": Change("sft.optimizer=adamw_8bit"),
    "sft.schedule": Change("sft.schedule=constant"),
    "sft.warmup_steps": Change("sft.warmup_steps=1"),
    "sft.decay_share": Change("sft.decay_share=1", given="sft.schedule=wsd"),
    "sft.weight_decay": Change("sft.weight_decay=0.5"),
    "sft.adam_beta1": Change("sft.adam_beta1=0.5"),
    "sft.adam_beta2": Change("sft.adam_beta2=0.9"),
    "sft.max_grad_norm": Change("sft.max_grad_norm=1e-8"),
    "sft.shuffle": Change("sft.shuffle=false"),
    "sft.loss_on": Change("sft.loss_on=all"),
    "sft.template": Change("sft.template=chat"),
    "sft.chat_template_args": Change("sft.chat_template_args={date_string:monday}", given=CHAT),
    "sft.template_date": Change("sft.template_date=2025-01-01", given=CHAT),
    "sft.separator": Change("sft.separator='a'"),
    "sft.eos_token": Change("sft.eos_token='<s>'"),
    "sft.precision": Change("sft.precision=bf16"),
    "sft.weights": Change("sft.weights=bfloat16"),
    "sft.gradient_checkpointing": Change(
        "sft.gradient_checkpointing=true",
        same_because="activations are computed twice from the same numbers",
    ),
    "sft.compile": Change(
        "sft.compile=true", same_because="the same step, compiled: tests/train/test_speed.py"
    ),
    "sft.liger": Change("sft.liger=true", refused="sft.liger=true"),
    "sft.save_dtype": Change("sft.save_dtype=bfloat16"),
    "sft.lora_rank": Change("sft.lora_rank=2", given="sft.adapter=lora"),
    "sft.lora_alpha": Change("sft.lora_alpha=64", given="sft.adapter=lora"),
    "sft.lora_dropout": Change("sft.lora_dropout=0.5", given="sft.adapter=lora"),
    "sft.lora_targets": Change("sft.lora_targets=[q_proj]", given="sft.adapter=lora"),
    "sft.validate_at_start": Change("sft.validate_at_start=true", given=VALIDATED),
    "sft.snapshot_every": Change("sft.snapshot_every=4"),
    "sft.snapshot_keep": Change("sft.snapshot_keep=1", given=SNAPSHOTS),
    "partition.bottom_layers": Change("partition.bottom_layers=2", given=PARTIAL),
    "partition.top_layers": Change("partition.top_layers=2", given=PARTIAL),
    "partition.all_attention": Change("partition.all_attention=true", given=PARTIAL),
    "partition.all_mlp": Change("partition.all_mlp=true", given=PARTIAL),
    "partition.inverse": Change("partition.inverse=true", given=PARTIAL),
    "partition.outside": Change("partition.outside=language", given=PARTIAL),
    "partition.scale_to_depth": Change(
        "partition.scale_to_depth=true partition.bottom_layers=16", given=PARTIAL
    ),
}


def hashed_knobs(kind: type, prefix: str = "") -> set[str]:
    """Return the fields of a dataclass that can enter a hash, without its nested parts.

    The parts have their own tables.
    """
    parts = (
        "stage",
        "tracking",
        "launcher",
        "model",
        "data",
        "expert",
        "sft",
        "partition",
        "merge",
        "eval",
    )
    return {
        prefix + item.name
        for item in fields(kind)
        if item.metadata.get("hashed", True) is not False and (prefix or item.name not in parts)
    }


def changes(table: dict[str, Change | list[Change]]) -> Iterator[Any]:
    for knob, listed in table.items():
        for number, change in enumerate(listed if isinstance(listed, list) else [listed]):
            yield pytest.param(knob, change, id=f"{knob}{number or ''}")


# --- what is compared ---


def result(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file with results.

    These are weights, tokenizer and log, or an evaluation's questions and scores.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if (
            path.is_file()
            and not name.startswith("tasks/")
            and name not in ("manifest.json", "README.md")
        ):
            content = path.read_bytes()
            if name == "scores.json":
                content = json.dumps(
                    [json.loads(content)[key] for key in ("rows", "beside")]
                ).encode()
            if not name.startswith("mergekit"):
                found[name] = hashlib.sha256(content).hexdigest()
    return found


# Words that name runs, files and dates, or that a group needs with it
COMPOSED = tuple(
    "model.path merge.base merge.expert merge.math= merge.language= merge.files_from partition."
    " sft.template_date eval.template_date".split()
)
CONFIGS: dict[tuple[str, ...], Any] = {}
MADE: dict[tuple[str, ...], Path] = {}


def configured(words: list[str]) -> Any:
    """Return a configuration as compose does, but faster.

    Values of single knobs are laid over what is composed once.
    """
    single = [
        word
        for word in words
        if re.fullmatch(r"(seed|deterministic|[a-z]+\.[a-z0-9_]+)=[^{\[]+", word)
    ]
    single = [word for word in single if not word.startswith(COMPOSED)]
    composed = tuple(word for word in words if word not in single)
    if composed not in CONFIGS:
        CONFIGS[composed] = stage_of(values_of(composed))
    config = copy.deepcopy(CONFIGS[composed])
    for word in single:
        key, _, text = word.partition("=")
        part, _, name = key.rpartition(".")
        value = yaml.safe_load(text)
        with suppress(TypeError, ValueError):
            value = float(value) if isinstance(value, str) else value
        setattr(getattr(config, part) if part else config, name, value)
    return config


@dataclass
class Maker:
    """Makes runs in a context. One that was made already is found again."""

    start: list[str]

    def folder(self, *more: str) -> Path:
        """Return the settings; the last value of a key counts."""
        last = {
            word.partition("=")[0]: word for text in (*self.start, *more) for word in text.split()
        }
        words = tuple(last.values())
        if words not in MADE:
            MADE[words] = make_single_run(configured(list(words)))
        return MADE[words]

    def check(self, knob: str, change: Change) -> None:
        """Check that a change has an effect in its context, and elsewhere only if it is hashed."""
        leaf = knob.rpartition(".")[2]
        if change.refused:
            with pytest.raises(PipelineError, match=change.refused):
                self.folder(change.given, change.words)
            return
        before, after = self.folder(change.given), self.folder(change.given, change.words)
        assert after != before, f"{knob} is read and not hashed"
        assert result(after) != result(before), f"{knob} is hashed and changes nothing"
        if change.given and not change.alone_because:
            try:
                alone = self.folder(change.words)
            except PipelineError as error:
                assert leaf in str(error) or "partition" in str(error)
                return
            reference = self.folder()
            assert alone == reference or result(alone) != result(reference), (
                f"{knob} is hashed where it is not read"
            )


def apart(*folders: Path) -> float:
    """Return the distance of the last two weights, relative to the first one's movement."""
    start, first, second = (load_file(folder / "model.safetensors") for folder in folders)
    distance = sum(float((first[name] - second[name]).square().sum()) for name in first)
    return (
        distance / sum(float((first[name] - start[name]).square().sum()) for name in first)
    ) ** 0.5


# --- training ---


def test_every_hashed_knob_is_listed() -> None:
    """A new knob: say in the table above what shows its effect."""
    parts = {"model.": Model, "sft.": Sft, "partition.": Partition, "": TrainStage}
    assert set(TRAINING) == set().union(
        *(hashed_knobs(kind, prefix) for prefix, kind in parts.items())
    )


@pytest.fixture(scope="module")
def training(make_run: Make, world: Path, runs_dir: Path) -> Maker:
    """Two steps of four rows from a base of four layers and width 16."""
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    shape = [
        f"model.architecture.{key}={value}"
        for key, value in {**small, "num_key_value_heads": 2}.items()
    ]
    few = ["sft.seq_length=96", "sft.batch_size=4", "sft.learning_rate=1e-3"]
    begun = [
        "stage=cpt",
        "model=sandbox_random",
        *shape,
        f"data_root={world}",
        "expert=sandbox_text",
        *few,
    ]
    base = make_run(*begun, "sft.steps=1")
    (base / "chat_template.jinja").write_text(
        "{{ date_string }}{% for m in messages %}{{ '<s>' if loop.first }}{{ m.role }} : {{"
        " m.content }}{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
    )
    start = [
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        "expert=math",
        "data.size=8",
    ]
    return Maker(
        [
            "stage=sft",
            *start,
            *few,
            "sft.precision=fp32",
            f"runs_dir={runs_dir}",
            "tracking.mode=disabled",
        ]
    )


@pytest.mark.parametrize(("knob", "change"), changes(TRAINING))
def test_training(training: Maker, knob: str, change: Change) -> None:
    if not change.same_because:
        training.check(knob, change)
    elif knob not in (
        "sft.processes",
        "sft.compile",
    ):  # which take long: their own tests compare them
        start = training.folder("sft.learning_rate=1e-30")
        assert apart(start, training.folder(), training.folder(change.words)) < 1e-2


# --- merging ---

SPLIT = "partition=own partition.bottom_layers=3 partition.top_layers=1"
LAST = {
    "adaptive_swap": "language",
    "layer_swap": "language",
    "reset": "base",
}  # of the sources, whose files are others
EXPERTS = "merge.experts=[MATH,LANGUAGE]"
WEIGHTS = "merge.weights=[0.3,0.9]"
SHARED: dict[str, Change | list[Change]] = {  # by all methods
    "dtype": Change("merge.dtype=float32"),
    "files_from": Change("merge.files_from=LAST"),
    "form": Change("merge.form=adapter", refused="merge.form=adapter is not possible"),
    "control": Change("merge.control=[LAST]"),
}
MERGING: dict[
    str, tuple[str, dict[str, Change | list[Change]]]
] = {  # method -> its words, its own knobs
    "adaptive_swap": (
        "merge.math=MATH merge.language=LANGUAGE",
        {
            "unit": Change("merge.unit=module"),
            "threshold": Change("merge.threshold=0.9"),
            "blend": Change("merge.blend=0.3"),
        },
    ),
    "dare": (
        EXPERTS,
        {
            "density": Change("merge.density=0.2"),
            "seed": Change("merge.seed=1"),
            "scale": Change("merge.scale=0.7"),
            "weights": Change(WEIGHTS),
        },
    ),
    "model_stock": (
        EXPERTS,
        {
            "scale": Change("merge.scale=0.7", refused="merge=model_stock computes its weights"),
            "weights": Change(WEIGHTS, refused="merge=model_stock computes its weights"),
        },
    ),
    "layer_swap": (
        "merge.math=MATH merge.language=LANGUAGE merge.bottom_layers=3 merge.top_layers=1",
        {
            "bottom_layers": Change("merge.bottom_layers=4"),
            "top_layers": Change("merge.top_layers=2"),
            "bottom_transition": Change("merge.bottom_transition=1"),
            "top_transition": Change("merge.top_transition=1"),
            "scale_to_depth": Change("merge.scale_to_depth=true merge.bottom_layers=16"),
            "zones": Change("merge.zones=magnitude", given="merge.bottom_transition=1"),
            "embeddings": Change("merge.embeddings=math"),
            "final_norm": Change("merge.final_norm=math"),
            "head": Change("merge.head=math"),
            "layer_norms": Change("merge.layer_norms=average"),
        },
    ),
    "reset": (
        "merge.expert=MATH merge.layers=[0]",
        {
            "control": Change("merge.control=[expert]", refused="leaves no expert"),
            "side": Change(
                "merge.side=language", given=f"{SPLIT} merge.side=math merge.layers=null"
            ),
            "layers": Change("merge.layers=[1]"),
            "threshold": Change("merge.threshold=0.04 merge.layers=null"),
            "axis": Change("merge.axis=output", given="merge.threshold=0.04 merge.layers=null"),
            "outside": Change("merge.outside=reset"),
        },
    ),
    "slerp": (EXPERTS, {"t": Change("merge.t=0.4")}),
    "soup": (EXPERTS, {"weights": Change("merge.weights=[0.3,0.7]")}),
    "task_arithmetic": (
        EXPERTS,
        {"scale": Change("merge.scale=0.7"), "weights": Change(WEIGHTS)},
    ),
    "ties": (
        EXPERTS,
        {
            "density": Change("merge.density=0.5"),
            "scale": Change("merge.scale=0.7"),
            "weights": Change(WEIGHTS),
        },
    ),
}


ELSEWHERE = ("mergekit",)  # needs mergekit: tests/merge/test_mergekit_methods.py
PARTITIONED = {
    "layer_swap": "merge.math=MATH merge.language=LANGUAGE",
    "reset": "merge.expert=MATH merge.side=math",
}
SPLITS: dict[str, Change | list[Change]] = {  # partition knobs in merges
    "bottom_layers": Change("partition.bottom_layers=4"),
    "top_layers": Change("partition.top_layers=2"),
    "all_attention": Change("partition.all_attention=true"),
    "all_mlp": Change("partition.all_mlp=true"),
    "inverse": Change("partition.inverse=true"),
    "outside": Change(
        "partition.outside=math", refused="partition.outside=math is only for training"
    ),
    "scale_to_depth": Change("partition.scale_to_depth=true partition.bottom_layers=16"),
}


def merges() -> Iterator[Any]:
    """Yield (method, its settings, knob, change)."""
    for method, (words, own) in MERGING.items():
        for item in changes({**SHARED, **own}):
            yield pytest.param(method, words, *item.values, id=f"{method}-{item.id}")
    for method, words in PARTITIONED.items():
        for item in changes(SPLITS):
            yield pytest.param(
                method, f"{words} {SPLIT}", *item.values, id=f"{method}-partition.{item.id}"
            )


def test_every_knob_of_a_merge_is_listed() -> None:
    shared = hashed_knobs(Merge, "merge.") - {"merge.method"}  # merge=METHOD
    assert {f"merge.{name}" for name in SHARED} == shared
    for method, kind in METHODS.items():
        if method in ELSEWHERE:
            continue
        own = {f"merge.{name}" for name in MERGING[method][1]} - {
            f"merge.{name}" for name in SHARED
        }
        assert own == hashed_knobs(kind, "merge.") - shared - {"merge.method"}, method
    assert PARTITIONED.keys() == {
        method for method, kind in METHODS.items() if kind.reads_partition
    }
    assert {f"partition.{name}" for name in SPLITS} == hashed_knobs(Partition, "partition.")
    assert hashed_knobs(MergeStage) == {
        "seed",
        "deterministic",
    }  # hashed where they are read, in trainings


@pytest.mark.parametrize(("method", "words", "knob", "change"), merges())
def test_merging(
    runs_dir: Path, models: Any, method: str, words: str, knob: str, change: Change
) -> None:
    base, math, language = models["llama"]

    def filled(text: str) -> str:
        places = {"MATH": math, "LANGUAGE": language, "LAST": LAST.get(method, "1")}
        for name, value in places.items():
            text = text.replace(name, str(value))
        return text

    start = [
        "stage=merge",
        f"merge={method}",
        f"merge.base={base}",
        filled(words),
        f"runs_dir={runs_dir}",
    ]
    start += ["tracking.mode=disabled"]
    Maker(start).check(
        knob, replace(change, words=filled(change.words), given=filled(change.given))
    )


def test_a_merge_of_adapters_is_one_unless_it_is_asked_for_dense(training: Maker) -> None:
    experts = ",".join(
        str(training.folder("sft.adapter=lora sft.steps=1", f"seed={seed}")) for seed in (0, 1)
    )
    merge = Maker([*training.start[-2:], f"stage=merge merge=soup merge.experts=[{experts}]"])
    merge.check("merge.form", Change("merge.form=dense"))


# --- evaluation ---

MGSM = "eval=mgsm_2shot"
CHOICES = "eval=belebele_0shot"
PROGRAMS = "{task:mbpp,num_fewshot:0}"
LEFT_OUT = "{task:mbpp,num_fewshot:0,where_possible:true}"
ROUNDING = "changes rounding alone, and answers with it; hashed below float32"
EVALUATION: dict[str, Change | list[Change]] = {
    "languages": Change("languages=[qac]"),
    "eval.tasks": Change(CHOICES),
    "eval.task.task": Change("eval.tasks=[{task:mgsm_direct,num_fewshot:0}]"),
    "eval.task.num_fewshot": Change("eval.tasks=[{task:mgsm,num_fewshot:1}]"),
    "eval.task.where_possible": Change(
        f"eval.tasks=[{PROGRAMS}]",
        given=f"eval.tasks=[{LEFT_OUT}]",
        refused="mbpp runs the programs",
    ),
    "eval.split": Change("eval.split=dev"),
    "eval.limit": Change("eval.limit=1"),
    "eval.max_gen_toks": Change("eval.max_gen_toks=1"),
    "eval.max_gen_toks_of": Change("+eval.max_gen_toks_of.en=1"),
    "eval.exemplars": [
        Change("eval.exemplars=random", given=MGSM),
        Change("eval.exemplars=random", given=CHOICES, refused="eval.exemplars=random: "),
    ],
    "eval.dtype": Change(
        "eval.dtype=bfloat16", given=CHOICES, alone_because="it rounds, and short answers may stay"
    ),
    "eval.backend": Change("eval.backend=vllm", refused="eval.backend=vllm needs vLLM"),
    "eval.chat_template": Change("eval.chat_template=true"),
    "eval.system_instruction": Change("eval.system_instruction=Answer."),
    "eval.fewshot_as_multiturn": Change(
        "eval.fewshot_as_multiturn=false",
        given="eval.chat_template=true eval.tasks=[{task:mgsm,num_fewshot:1}]",
    ),
    "eval.chat_template_args": Change(
        "eval.chat_template_args={date_string:monday}",
        given="eval.chat_template=true",
    ),
    "eval.template_date": Change("eval.template_date=2025-01-01", given="eval.chat_template=true"),
    "eval.options": Change("eval.options=text", given=CHOICES),
    "eval.run_code": Change(
        "eval.run_code=true", same_because="mbpp alone reads it, and is refused without it"
    ),
    "eval.temperature": Change("eval.temperature=2"),
    "eval.top_p": Change("eval.top_p=0.01", given="eval.temperature=2"),
    "eval.answers": Change("eval.answers=2", given="eval.temperature=2"),
    "eval.sample_seed": Change("eval.sample_seed=1", given="eval.temperature=2"),
    "eval.think_end": Change('eval.think_end="="'),
    "eval.products": Change("eval.products=bf16x3", refused="eval.products=bf16x3 needs a GPU"),
    "eval.batch_size": Change("eval.batch_size=2", same_because=ROUNDING),
    "eval.share_prefix": Change("eval.share_prefix=false", same_because=ROUNDING),
}


def test_every_knob_of_an_evaluation_is_listed() -> None:
    parts = {"eval.": Eval, "eval.task.": EvalTask, "": EvalStage}
    listed = set().union(*(hashed_knobs(kind, prefix) for prefix, kind in parts.items()))
    assert set(EVALUATION) == listed - {
        "seed",
        "deterministic",
    }  # hashed where they are read, in trainings


@pytest.fixture(scope="module")
def evaluation(world: Path, training: Maker, tmp_path_factory: Any) -> Maker:
    """Return MGSM in English with three problems, the shipped base, and a dated chat template."""
    model = shutil.copytree(BASE, tmp_path_factory.mktemp("knobs") / "model")
    (model / "manifest.json").unlink()
    shutil.copy(training.folder() / "chat_template.jinja", model)
    asked = ["eval=mgsm_0shot", "languages=[en]", "eval.limit=2", "eval.max_gen_toks=8"]
    return Maker(
        [*training.start[-2:], "stage=eval", f"checkpoint={model}", f"data_root={world}", *asked]
    )


@pytest.mark.parametrize(("knob", "change"), changes(EVALUATION))
def test_evaluation(evaluation: Maker, knob: str, change: Change) -> None:
    if not change.same_because:
        evaluation.check(knob, change)
    else:
        assert result(evaluation.folder(change.words)) == result(evaluation.folder())
