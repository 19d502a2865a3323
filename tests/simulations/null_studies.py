"""Count how often a report claims a difference that does not exist.

    python tests/simulations/null_studies.py --record results/bench/null_studies.json
    python tests/simulations/null_studies.py --seeds --record results/bench/null_seeds.json

Answers are drawn for shipped tables in which all models are equally good, and the first sentences
of their pages are read. An answer is right if a sum of normal numbers is positive: the level of its
task and language, its question's difficulty, which all models share, the chance of its model's
trainings (`spread`), and its own part. Cells, comparisons, claims and sentences come from the
program; only the answers are drawn.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest

from pipeline.benchmarks import is_measure
from pipeline.config.compose import compose
from pipeline.report.claims import CONTRADICTED, FACT, SHOWN, Claim
from pipeline.report.compare import headline_sentences
from pipeline.report.contrasts import compared_pairs, measure_pairs
from pipeline.report.detectable import task_and_questions
from pipeline.report.frame import NoScore
from pipeline.report.load.answers import Vector
from pipeline.report.placed_claims import claims_of
from pipeline.report.stored import StoredAnswers, Translations
from pipeline.report.verdicts import judge_claims
from pipeline.runs.provenance import machine_facts, package_versions
from pipeline.stats.detectable import DISCORDANT
from pipeline.tables.plan import Cell, ScoreRef, difference_of
from pipeline.tables.planned_runs import Planning
from pipeline.tables.run_specs import Spec
from pipeline.tables.schema import TRAININGS

# (table, spread of trainings, studies)
STUDIES = (
    ("sandbox", 0.0, 200),  # the demo: a primary comparison, controls, chrF++
    ("laptop_real", 0.0, 230),  # a primary comparison, three languages, measures in bits
    (
        "unreasonable_table3",
        0.0,
        125,
    ),  # a primary comparison, means of four models, best configurations
    (
        "layer_swapping_table1",
        0.0,
        20,
    ),  # four languages, nine pairs of experts: means, maxima, best configurations
    (
        "sandbox_layer_swapping",
        0.0,
        80,
    ),  # the same in one language, with minima, joint training, TIES and controls
    ("sandbox_full", 0.0, 60),  # three languages, three seeds
    (
        "sandbox_full",
        0.2,
        60,
    ),  # a training is 8 points better or worse (standard deviation, at 50 %)
)
# (seeds, spread of trainings, share of a question that those about its passage have in common for
# one model), studies; 2, 4 and 8 points at 50 % are 0.05, 0.1 and 0.2. One or two seeds say "These
# trainings alone" in every sentence.
SEEDS = tuple((seeds, spread, 0.0) for seeds in (1, 2, 3) for spread in (0.0, 0.05, 0.1, 0.2)) + (
    (1, 0.0, 0.15),
)
# Claims of trainings, three seeds each, at 0, 1, 2 and 4 points; fewer worlds of the larger table.
# Of the first, in which one claim is false in 4 % of them, the record has 2,000 worlds at 4 points.
CLAIMED = (
    ("unreasonable_table_a1", 500),
    ("unreasonable_table2", 500),
    ("unreasonable_table_a2", 500),
    ("unreasonable_table_a3", 500),
    ("unreasonable_table3", 100),
)
ALIKE = math.cos(
    math.pi * DISCORDANT
)  # correlation of two models: DISCORDANT of their answers differ at 50 %
SAME_QUESTION = 0.5  # share of a question's difficulty that it has in all languages
RATES = (0.05, 0.95)  # levels of tasks and languages
SENTENCES, LENGTH = 100, 6  # of a translation, and its words
TWENTY_POINTS = NormalDist().inv_cdf(0.7)  # a shift from 50 %
DIFFERENCE = re.compile(r"” is (better|worse) than “")


class TablePlanned(NamedTuple):
    """A table, bound to runs that need not exist; counts: questions of each score."""

    planning: Planning
    counts: dict[ScoreRef, int]

    @classmethod
    @functools.cache
    def of(cls, name: str, *words: str) -> TablePlanned:
        planning = Planning.of(compose(["stage=plan", f"table={name}", *words]))  # type: ignore[arg-type]
        counted = {score: task_and_questions(planning, score) for score in planning.plan.scores}
        counts = {score: size[1] if size else SENTENCES for score, size in counted.items()}
        return cls(planning, counts)


@dataclass
class DrawnAnswers(StoredAnswers):
    """The answers of one study. spread.

    Standard deviation of a training's part, where an answer's own part and its question's have
    variance 1 together; effects: run -> shift of its models; rates: bounds of the levels.
    """

    counts: Mapping[ScoreRef, int] = field(default_factory=dict)
    seed: int = 0
    spread: float = 0.0
    effects: Mapping[str, float] = field(default_factory=dict)
    rates: tuple[float, float] = RATES
    passages: float = (
        0.0  # share of an answer's own variance that it has in common with the other of its passage
    )

    def groups_of(self, score: ScoreRef, pair: str | None) -> dict[int, int]:
        return {doc: doc // 2 for doc in range(self.counts[score])} if self.passages else {}

    def rng(self, *names: object) -> np.random.Generator:
        digest = hashlib.sha256(json.dumps([self.seed, *map(str, names)]).encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:16], "big"))

    def spec_of(self, score: ScoreRef) -> Spec:
        """Return the spec of a model; for a choice, the spec of its first candidate."""
        plan = self.table.plan
        key = (
            score.model
            if score.model in plan.specs
            else next(iter(plan.chosen[score.model].models.values()))
        )
        return plan.specs[key]

    def trainings_of(self, spec: Spec) -> set[str]:
        own = {spec.key} if spec.words.get("stage") in TRAININGS else set()
        return own.union(
            *(self.trainings_of(self.table.plan.specs[ref.spec]) for ref in spec.parent_refs())
        )

    def latent(self, score: ScoreRef, pair: str | None, skewed: bool, words: int = 1) -> np.ndarray:
        """(N, words) latent scores, positive for a right answer.

        Their variance is 1 for every model, so that the expected share of right answers is the same
        for all, however many trainings a model is made of.
        """
        spec, task, count = self.spec_of(score), score.words.get("task"), self.counts[score]
        place = (task, score.language, pair)
        level = NormalDist().inv_cdf(self.rng("level", *place).uniform(*self.rates))
        shared, own = (
            self.rng("question", *where).normal(size=count) for where in ((task,), place)
        )
        question = math.sqrt(ALIKE) * (
            math.sqrt(SAME_QUESTION) * shared + math.sqrt(1 - SAME_QUESTION) * own
        )
        trainings = sorted(self.trainings_of(spec)) if self.spread else []
        chance = self.spread * np.mean(
            [self.rng("training", key).normal() for key in trainings] or [0.0]
        )
        left = 1 - ALIKE - (self.spread**2 / len(trainings) if trainings else 0.0)
        answers = self.rng("answers", score, pair)
        noise = (
            answers.exponential(size=(count, words)) - 1
            if skewed
            else answers.normal(size=(count, words))
        )
        if self.passages:
            of_passage = (
                self.rng("passage", score, pair)
                .normal(size=(-(-count // 2), words))
                .repeat(2, axis=0)[:count]
            )
            noise = math.sqrt(self.passages) * of_passage + math.sqrt(1 - self.passages) * noise
        shift = level + chance + self.effects.get(spec.run, 0.0)
        return shift + question[:, None] + math.sqrt(left) * noise

    def scores_by_question(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        if difference_of(score, metric):
            return super().scores_by_question(score, metric, pair)
        latent = self.latent(score, pair, is_measure(metric))[:, 0]
        return dict(
            enumerate((latent if is_measure(metric) else (latent > 0).astype(float)).tolist())
        )

    def read_translations(self, score: ScoreRef, pair: str | None) -> dict[str, Translations]:
        words = [f"{letter}{letter}ex" for letter in "abcdefgh"[:LENGTH]]
        texts = {}
        for name in [pair] if pair else [f"en-{score.language}", f"{score.language}-en"]:
            right = self.latent(score, name, False, LENGTH) > 0
            responses = (
                " ".join(word if one else "o" for word, one in zip(words, of, strict=True))
                for of in right
            )
            texts[name] = {
                doc: (" ".join(words), response) for doc, response in enumerate(responses)
            }
        return texts

    def fact(self, cell: Cell, key: ScoreRef | str) -> float:
        raise NoScore("no training recorded anything")

    def number(self, score: ScoreRef, metric: str | None = None, pair: str | None = None) -> float:
        return 100 * float(
            np.mean(list(self.scores_by_question(score, metric or "", pair).values()))
        )


class Page(NamedTuple):
    """What a page claims: its first sentences, and the claims whose verdict is an effect, by id."""

    headline: str
    claims: tuple[str, ...]

    @property
    def claims_a_difference(self) -> bool:
        return DIFFERENCE.search(self.headline) is not None


def page_of(planned: TablePlanned, with_claims: bool = True, **study: Any) -> Page:
    """Return the page of a study of this table. `study` are the fields of DrawnAnswers."""
    plan = planned.planning.plan
    answers = DrawnAnswers(planned.planning, counts=planned.counts, **study)
    lines = measure_pairs(plan, answers, compared_pairs(plan))
    headline = " ".join(headline_sentences(lines))
    verdicts = judge_claims(plan, answers) if with_claims else []
    effects = {claim.id: false_verdicts(claim) for claim in claims_of(plan.table.name)}
    claims = (
        verdict.claim.id for verdict in verdicts if verdict.verdict in effects[verdict.claim.id]
    )
    return Page(headline, tuple(claims))


def false_verdicts(claim: Claim) -> set[str]:
    """Return the verdicts on a claim that are false if all models are equally good."""
    if claim.direction == "differ":
        return {SHOWN}
    if claim.direction == "within":
        return {CONTRADICTED}
    sign = (
        -1 if claim.direction == "lower" and claim.relative else 1
    )  # lower than N % more than the right side
    return {
        word
        for word, side in ((SHOWN, 1), (CONTRADICTED, -1))
        if side * sign * claim.threshold >= 0
    }


def exact_interval(count: int, of: int) -> list[float]:
    low, high = binomtest(count, of).proportion_ci(0.95, "exact")
    return [round(float(low), 4), round(float(high), 4)]


def run_studies(name: str, spread: float, studies: int, seed: int = 0) -> dict[str, Any]:
    """Count the studies that claim a difference in first sentences and in verdicts."""
    planned, began = TablePlanned.of(name), time.process_time()
    pages = [page_of(planned, seed=seed + at, spread=spread) for at in range(studies)]
    headlines, claims = (
        sum(page.claims_a_difference for page in pages),
        sum(bool(page.claims) for page in pages),
    )
    found = {"table": name, "spread": spread, "studies": studies}
    for kind, count in (("false_sentence", headlines), ("false_claim", claims)):
        found |= {kind: count, f"{kind}_interval": exact_interval(count, studies)}
    return found | {"cpu_seconds": round(time.process_time() - began, 1)}


def run_seeds(
    seeds: int, spread: float, passages: float, studies: int, seed: int = 0
) -> dict[str, Any]:
    """Return first sentences by seeds for the demo's questions, or for Belebele with passages.

    Questions share passages.
    """
    planned = TablePlanned.of("sandbox", f"every.seed={list(range(seeds))}")
    pages = [
        page_of(planned, False, seed=seed + at, spread=spread, passages=passages)
        for at in range(studies)
    ]
    false = [page for page in pages if page.claims_a_difference]
    scoped = sum("These trainings alone" in page.headline for page in false)
    found = {
        "seeds": seeds,
        "spread": spread,
        "passages": passages,
        "studies": studies,
        "false_sentence": len(false),
    }
    return found | {
        "these_trainings_alone": scoped,
        "false_sentence_interval": exact_interval(len(false), studies),
    }


def run_claims(table: str, spread: float, worlds: int, seed: int = 0) -> dict[str, Any]:
    """Count the wrong decisions of each claim about trainings, with three seeds each.

    All trainings are equally good.
    """
    planned, false = TablePlanned.of(table, "every.seed=[0,1,2]"), Counter[str]()
    effects = {
        claim.id: false_verdicts(claim) for claim in claims_of(table) if claim.metric != FACT
    }
    for at in range(worlds):
        answers = DrawnAnswers(
            planned.planning, counts=planned.counts, seed=seed + at, spread=spread
        )
        verdicts = judge_claims(planned.planning.plan, answers)
        false.update(
            verdict.claim.id
            for verdict in verdicts
            if verdict.verdict in effects.get(verdict.claim.id, ())
        )
    counts = {name: [false[name], exact_interval(false[name], worlds)[1]] for name in effects}
    return {"table": table, "spread": spread, "worlds": worlds, "false_and_upper_limit": counts}


def run_effects(studies: int, seed: int = 0) -> dict[str, Any]:
    """Return the demo's primary sentence if its swap is right in 70 % and others in 50 %."""
    planned, swap = TablePlanned.of("sandbox"), {"layer swap": TWENTY_POINTS}
    pages = [
        page_of(planned, False, seed=seed + at, effects=swap, rates=(0.5, 0.5))
        for at in range(studies)
    ]
    said = [
        re.search("“layer swap” is (better|worse) than “math expert”", page.headline)
        for page in pages
    ]
    words = Counter(match[1] if match else "not significant" for match in said)
    return {"table": "sandbox", "points": 20, "studies": studies, **words}


def run_tables(share: float, seed: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for name, spread, studies in STUDIES:
        rows.append(run_studies(name, spread, part(share, studies), seed))
        seed += rows[-1]["studies"]
        print(rows[-1], flush=True)
    studies, false = (sum(row[key] for row in rows) for key in ("studies", "false_sentence"))
    total = {
        "studies": studies,
        "false_sentence": false,
        "rate": round(false / studies, 4),
        "interval": exact_interval(false, studies),
    }
    print(total)
    effects = run_effects(part(share, 50), seed)
    print(effects)
    return {"total": total, "effects": effects, "rows": rows}


def run_seeds_and_claims(share: float, seed: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"seeds": [], "claims": []}
    for seeds, spread, passages in SEEDS:
        found["seeds"].append(run_seeds(seeds, spread, passages, part(share, 50), seed))
        print(found["seeds"][-1], flush=True)
    for table, worlds in CLAIMED:
        for points in (0.0, 0.025, 0.05, 0.1):
            found["claims"].append(run_claims(table, points, part(share, worlds), seed))
            print(found["claims"][-1], flush=True)
    return found


def part(share: float, count: int) -> int:
    return max(1, round(share * count))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first study; each next one has the next"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the studies of each table"
    )
    parser.add_argument("--record", type=Path)
    parser.add_argument(
        "--seeds", action="store_true", help="only what seeds do: first sentences, and claims"
    )
    options = parser.parse_args()
    about = {
        "machine": machine_facts(),
        "versions": package_versions(),
        "load": os.getloadavg(),
        "seed": options.seed,
    }
    found = (run_seeds_and_claims if options.seeds else run_tables)(options.share, options.seed)
    if options.record:
        options.record.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
