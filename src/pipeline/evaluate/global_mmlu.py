"""A task of the harness whose exemplars come from the question's subject.

Named by tasks/global_mmlu.yaml.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.samplers import FirstNSampler
from lm_eval.api.task import ConfigurableTask


class BySubject(ConfigurableTask):
    """All subjects as one task. A question's prompt is that of the harness' task of its subject.

    The harness has 57 tasks per language. Each of them loads the whole language and keeps one
    subject.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        settings = dict(config)
        settings.pop("class", None)
        super().__init__(config=settings)
        self.exemplars: dict[str, list[dict[str, Any]]] = {}
        for doc in self.eval_docs:
            self.exemplars.setdefault(doc["subject"], [])
        for doc in self.fewshot_docs():
            self.exemplars.setdefault(doc["subject"], []).append(doc)

    def fewshot_context(self, doc: dict[str, Any], *args: Any, **kwargs: Any) -> str | list[str]:
        self.sampler = FirstNSampler(self.exemplars[doc["subject"]])
        return super().fewshot_context(doc, *args, **kwargs)
