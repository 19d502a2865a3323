"""A table's plan bound to its runs: the run of each score, as far as choices are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.stages import EvalStage
from pipeline.runs.run import Parent, Run
from pipeline.tables.plan import Candidate, ScoreRef, TablePlan
from pipeline.tables.run_specs import Spec


@dataclass(frozen=True)
class BoundTable:
    """evaluations: the run that computes each score, finished or not; none where its model is still to be chosen or
    cannot be built, which `problems` explains, by score or spec. models: the run or model of each spec that was built.
    winners: the candidate that each choice chose; None until all its candidates are scored."""

    plan: TablePlan
    evaluations: Mapping[ScoreRef, Run[EvalStage]]
    models: Mapping[str, Parent]
    winners: Mapping[str, Candidate | None]
    problems: Mapping[str | ScoreRef, str]

    def training_of(self, key: str) -> Run | None:
        """The run of a spec; None where it cannot be built, or is an external model."""
        model = self.models.get(key)
        return model if isinstance(model, Run) else None

    def spec_of(self, score: ScoreRef) -> Spec | None:
        """The spec of the scored model; None while its choice is open, or without one."""
        if score.model in self.plan.specs:
            return self.plan.specs[score.model]
        model = self.plan.chosen.get(score.model)
        winner = self.winners[model.choice] if model else None
        return self.plan.specs[model.models[winner]] if model and winner is not None else None
