"""Training sets and their sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omegaconf import MISSING

from pipeline.config.knob import Knobs, knob
from pipeline.errors import PipelineError

# these readers take prompts and completions as the user wrote them
OWN_PROMPTS = ("template", "pairs")


@dataclass
class Source(Knobs):
    """One data set: where it is on the Hub or below data_root, and which of its rows are used.

    Sources without `share` contribute all their rows. The others divide the rest of data.size by
    `share`.
    """

    hub: str | None = None  # id of the repository, or a folder with a copy of it
    hub_config: str | None = None
    split: str = "train"
    revision: str | None = None  # null: as locked by stage=prefetch, or the newest until then
    files: str | None = (
        None  # pattern of files in the repository, read directly instead of by its script
    )
    url: str | None = None  # one file, local or on the web, instead of a repository
    format: str | None = knob(
        None, options=("json", "csv", "parquet", "text")
    )  # format of files and url; null: by file name
    licence: str = knob("", hashed=False)
    paper: str = knob("", hashed=False)  # where the papers mention it
    file: str = MISSING  # below data_root: JSONL, CSV or parquet, or raw bitext
    rows: str = MISSING  # the reader of data/sources.py
    language: str | None = None  # a code of conf/languages.yaml: only rows in this language
    language_column: str | None = (
        None  # the column with each row's language; only rows in `language` are used
    )
    # the column of rows=text (null: text) or rows=conversation (null: the language's FLORES code)
    column: str | None = None
    prompt: str | None = (
        # rows=template, bitext (the English side): text with {column}s; {column?} may be blank
        None
    )
    # rows=template, bitext (the other side); rows=conversation: a second column of turns, such as
    # '{completion}'
    completion: str | None = None
    turns: int | None = knob(
        None, ge=1
    )  # rows=conversation: turns kept from its beginning; null: all
    min_score: float | None = None  # rows=nllb: minimum LASER margin
    without: list[str] | None = (
        None  # drop items of these benchmarks even with data.decontaminate=count
    )
    stream: bool = (
        False  # read `candidates` rows, shuffled by the seed, without downloading the whole set
    )
    candidates: int | None = knob(None, ge=1)  # rows to read of a stream; null: all
    share: float | None = knob(None, gt=0)

    @property
    def is_on_web(self) -> bool:
        """Return True if `url` is an address, not a local file."""
        return "://" in (self.url or "")

    @property
    def is_language_set(self) -> bool:
        return self.language not in (None, "en")


# Items per benchmark, split and language that ship; scripts/make_small_world.py writes more
LARGEST = 500


@dataclass
class World(Knobs):
    """The small world (data/small_world.py)."""

    items: int = knob(100, ge=1, le=LARGEST)  # test items per benchmark and language
    generation: int = knob(
        1, ge=1
    )  # internal: version of the shipped files, raised in conf/expert/sandbox.yaml
    dev_items: ClassVar[int] = 250


@dataclass
class Items(Knobs):
    """Benchmark items of a small world, the data_root, in a separate data run.

    More items then need no new training.
    """

    dev: int = knob(500, ge=1, le=LARGEST)
    test: int = knob(100, ge=1, le=LARGEST)  # per benchmark and language


@dataclass
class Expert(Knobs):
    """An expert's training data.

    `side` is the side of a swap that the expert supplies; both: a joint set, whose rows have a side
    each; none: text to train a base. A joint set is the union of the data runs of its two experts,
    drawn with the same data.* and seed.
    """

    name: str = knob(hashed=False)
    side: str = knob(MISSING, options=("math", "language", "both", "none"), hashed=False)
    sources: dict[str, Source] = field(default_factory=dict)
    union: dict[str, Expert] = knob(
        {}, hashed=False
    )  # for a joint set: its two experts, whose data runs are parents
    text: dict[str, Source] = knob({}, hashed=False)  # stage=cpt reads these instead of sources
    size: int | None = knob(None, ge=1)  # training rows if data.size is not set
    world: World | None = None  # set: the data run writes the small world instead of a training set
    items: Items | None = None  # set: the data run writes items of the small world in data_root

    @property
    def languages(self) -> list[str]:
        """Return the languages of its sources, without repetitions."""
        return list(
            dict.fromkeys(source.language for source in self.sources.values() if source.language)
        )

    @property
    def is_own(self) -> bool:
        """Return True if all rows come from the user's files. No shipped set has such rows."""
        sources = self.sources.values()
        if not sources:
            return False
        return all(source.hub is None and not source.is_on_web for source in sources)

    def all_sources(self) -> list[tuple[str, Source]]:
        """Return the sources with their names. A joint set has the sources of its experts."""
        members = [self, *self.union.values()]
        found = []
        for member in members:
            for item in member.sources.items():
                found.append(item)
        return found

    def questions(self, split: str) -> int | None:
        """Return the number of items per benchmark and language of a small world.

        Returns None for other data.
        """
        if self.items:
            if split == "test":
                return self.items.test
            return self.items.dev
        if self.world:
            if split == "test":
                return self.world.items
            return self.world.dev_items
        return None


def default_separator(expert: Expert) -> str:
    """Return the text between prompt and completion.

    It is empty for the user's prompts, and a line feed for shipped sources.

    Raises:
        PipelineError: the expert has sources of both kinds.
    """
    sources = expert.all_sources()
    others = [name for name, source in sources if source.rows not in OWN_PROMPTS]
    if len(others) == len(sources):
        return "\n"
    if others:
        raise PipelineError(
            f"expert={expert.name}: some prompts are your own, but the prompts of {others[0]} are"
            " not. Set "
            r"sft.separator='' for no text between prompt and completion, or sft.separator='\n' for"
            r" a line feed."
        )
    return ""


@dataclass
class Data(Knobs):
    """The mixture that is drawn from an expert's sources.

    Dropping rows deviates from the papers. The data card counts the rows either way.
    """

    size: int | None = knob(None, ge=1)  # training rows; null: the expert's size, or all
    validation: int = knob(0, ge=0)  # rows held out, in addition to `size`
    shuffle: bool = True  # false: keep the order of the sources, as a curriculum needs
    leave_out: list[str] | None = knob(
        None, hashed=False
    )  # sources of the expert to leave out of this mixture
    allow_fewer: bool = False  # accept sources with fewer rows than requested
    decontaminate: str = knob(
        "drop", options=("drop", "count")
    )  # what to do with rows that share an n-gram with a benchmark
    # what to do with rows that share an n-gram once numbers are removed; null: as decontaminate,
    # but count in language sets
    number_variants: str | None = knob(None, options=("drop", "count"))
    # length of the n-grams in words; in scripts without spaces twice as many characters
    ngram: int = knob(13, ge=4)
    # a folder with data_root's layout; null: data_root, otherwise the Hub; none: no comparison with
    # benchmarks
    benchmarks: str | None = knob(None, run=True, hashed=lambda data: data.benchmarks == "none")
    # internal: the tasks that a table scores -> the file or folder of their rows; empty: on the Hub
    scored: dict[str, str] | None = knob(None, hashed=False)
    # what to do with word problems in language sets
    word_problems: str = knob("drop", options=("drop", "count"))
