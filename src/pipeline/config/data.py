"""What is taught, from which rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from pipeline.config.knob import knob


@dataclass
class Source:
    """One dataset: where it is on the Hub, or below data_root, which rows are taken, and how many.

    How many: `count` rows, or a `share` of what data.size leaves to shares, or neither: all there are.
    """

    hub: str | None = None  # id of the repository, or a folder that is a copy of one
    hub_config: str | None = None
    split: str = "train"
    revision: str | None = None  # null: what stage=prefetch locked, until then the newest
    files: str | None = None  # a pattern of files inside the repository, read as they are: around a script, or a part
    url: str | None = None  # one file that is on no hub
    format: str | None = knob(None, options=("json", "csv", "parquet", "text"))  # of files and url; null: by their name
    licence: str = knob("", hashed=False)
    paper: str = knob("", hashed=False)  # where the papers name it
    file: str = MISSING  # below data_root: JSONL, CSV or parquet, or raw bitext
    rows: str = MISSING  # the function of data/sources.py that reads a row
    language: str | None = None  # our code; only rows of it
    column: str | None = None  # rows=text, conversation: the column; null: text, the language's FLORES code
    prompt: str | None = None  # rows=template, bitext (the English side): text with {column}s
    completion: str | None = None  # rows=template, bitext (the other side)
    turns: int | None = knob(None, low=1)  # rows=conversation: turns kept from its beginning; null: all
    tool_turns: str = knob(
        "drop", options=("drop", "keep")
    )  # rows=conversation: those with tools, for sft.template=chat
    min_score: float | None = None  # rows=nllb: LASER margin
    without: list[str] | None = None  # benchmarks whose items are dropped even where data.decontaminate=count
    stream: bool = False  # read only as far as `candidates`, in an order shuffled by the seed, without fetching all
    candidates: int | None = knob(None, low=1)  # rows that are looked at; null: all, 10 million at most
    count: int | None = knob(None, low=1)
    share: float | None = knob(None, above=0)


@dataclass
class World:
    """The small world (data/sandbox.py): sizes in items or rows."""

    seed: int = knob(0, low=0)  # lexicons and facts; the shipped base knows those of seed 0
    items: int = knob(100, low=1, high=2000)  # test items a benchmark and language
    dev_items: int = knob(250, low=1, high=2000)
    math_rows: int = knob(6000, low=1)
    language_rows: int = knob(16000, low=1)  # a clone language
    documents: int = knob(0, low=0)  # plain text to make a base from; 0: none is written
    last_documents: int = knob(0, low=0)  # and what it reads after that, much of it in qac


@dataclass
class Items:
    """Items of the benchmarks of a small world, the data_root, in a data run of their own: more retrain nothing."""

    dev: int = knob(500, low=1, high=2000)
    test: int = knob(100, low=1, high=2000)  # a benchmark and language


@dataclass
class Expert:
    """What is taught, and from which sets.

    side: whose layers it gives to a swap; both: a joint set, whose rows say their side; none: text that makes a base.
    A joint set is the union of what its two experts' data runs give, each drawn by the same data.* and seed.
    """

    name: str = knob(hashed=False)
    side: str = knob(MISSING, options=("math", "language", "both", "none"), hashed=False)
    sources: dict[str, Source] = field(default_factory=dict)
    union: dict[str, Expert] = knob({}, hashed=False)  # of a joint set: its two experts; their data runs are parents
    text: dict[str, Source] = knob({}, hashed=False)  # what stage=cpt reads in place of sources, where there is any
    size: int | None = knob(None, low=1)  # training rows where data.size does not say
    world: World | None = None  # set: the data run writes the small world instead of a training set
    items: Items | None = None  # set: it writes items of the small world that is its data_root

    def questions(self, split: str) -> int | None:
        """A benchmark's and language's, in what is written of a small world; None of any other data."""
        if self.items:
            return self.items.test if split == "test" else self.items.dev
        if self.world:
            return self.world.items if split == "test" else self.world.dev_items
        return None


@dataclass
class Data:
    """The mixture drawn from an expert's sources. Dropping departs from the papers' letter; the card counts either."""

    size: int | None = knob(None, low=1)  # training rows; null: the expert's own, else all there are
    validation: int = knob(0, low=0)  # rows kept apart, besides `size`
    shuffle: bool = True  # false: the sources' own order, for a set that is a curriculum
    leave_out: list[str] | None = knob(None, hashed=False)  # sources that the expert has and this mixture has not
    allow_fewer: bool = False  # take what there is where a source has fewer rows than asked
    decontaminate: str = knob("drop", options=("drop", "count"))  # rows that share an n-gram with a benchmark
    # rows that share one with numbers left out of both; null: as decontaminate, in language sets count
    number_variants: str | None = knob(None, options=("drop", "count"))
    ngram: int = knob(13, low=4)  # words; twice as many characters where a script has no spaces
    benchmarks: str | None = knob(None, run=True)  # a folder laid out as data_root; null: data_root, else the Hub
    word_problems: str = knob("drop", options=("drop", "count"))  # of language sets
