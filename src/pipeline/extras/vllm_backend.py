"""The backend vLLM, through the harness' own class.

A merge is written to disk before it is scored.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pipeline.errors import PipelineError
from pipeline.evaluate.backend import Tokens, without_weights
from pipeline.evaluate.decode import Ending, settings_beyond_greedy
from pipeline.evaluate.steps import Sampling
from pipeline.evaluate.torch_backend import most_rows
from pipeline.merge.digests import verify_sources
from pipeline.runs.provenance import package_version

if TYPE_CHECKING:
    from pipeline.config.evaluation import Eval
    from pipeline.merge.merge import Merging

SETTINGS = {  # vLLM's, unless the environment sets others
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a signal ends this process and vLLM together
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB of keys and values; by default nearly all memory
}


@dataclass(eq=False)
class VllmBackend:
    """A model in vLLM.

    `scratch` is an empty folder for the files of a merge. `share_prefix` enables vLLM's prefix
    cache. `model` is the model without weights, and `vllm` lm_eval's VLLM.
    """

    rows: int | None
    dtype: str
    weights: Merging | Path
    scratch: Path
    share_prefix: bool = True
    model: Any = None
    vllm: Any = None

    halved: ClassVar = False  # vLLM fits rows to its memory

    def __post_init__(self) -> None:
        self.batch_size = most_rows(self.rows)

    def load(self) -> Any:
        """Start vLLM, and return the model without weights, whose settings the harness reads."""
        if self.vllm is not None:
            return self.model
        self.model, tokenizer = without_weights(self.weights)
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from lm_eval.models.vllm_causallms import VLLM
        from vllm.platforms import current_platform

        self.vllm = VLLM(
            str(self._folder()),
            dtype=self.dtype,
            tokenizer=tokenizer.name_or_path,
            max_model_len=-1,
            seed=0,
            max_num_seqs=self.batch_size,
            enable_prefix_caching=self.share_prefix,
            enforce_eager=current_platform.is_cpu(),
            generation_config="vllm",
        )
        self.vllm._max_length = None  # with -1, vLLM chose the length that fits its memory
        return self.model

    def _folder(self) -> Path:
        """Return the folder of the checkpoint.

        Merges and adapters are written there as whole models.
        """
        if isinstance(self.weights, Path):
            return self.weights
        verify_sources(self.weights)
        replace(self.weights, adapter=None).write(self.scratch)
        return self.scratch

    def close(self) -> None:
        """Free the memory of weights, keys and values."""
        self.vllm = None
        if "vllm.distributed" in sys.modules:
            sys.modules["vllm.distributed"].cleanup_dist_env_and_memory()
        gc.collect()

    # --- answers ---

    def can_share(self) -> bool:
        return True

    def can_generate(self) -> bool:
        """Return False if the model's generation_config.json sets more than vLLM is told."""
        return not settings_beyond_greedy(self.model)

    def generate(
        self,
        prompts: Sequence[Tokens],
        ending: Ending,
        share: bool,
        ended: Callable[[int, list[int]], None],
        sampling: Sampling | None = None,
    ) -> None:
        """Generate an answer to each prompt. A sampled answer only depends on its own seed."""
        from vllm import SamplingParams

        settings = []
        for place, prompt in enumerate(prompts):
            self._refuse_too_long(len(prompt) + ending.room)
            drawn: dict[str, Any] = {"temperature": 0}
            if sampling:
                drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p}
                drawn["seed"] = sampling.seed(place)
            params = SamplingParams(
                max_tokens=ending.room,
                stop=[] if ending.think_end else list(ending.stop),
                ignore_eos=True,
                stop_token_ids=sorted(ending.ends),
                skip_special_tokens=False,
                **drawn,
            )
            settings.append(params)
        outputs = self.vllm._model_generate(prompts, True, settings)
        for place, output in enumerate(outputs):
            ended(place, list(output.outputs[0].token_ids))

    def loglikelihood(
        self,
        requests: Sequence[tuple[Tokens, Tokens]],
        share: bool,
        scored: Callable[[int, float, bool], None],
    ) -> None:
        """Score continuations as the harness' class does, by log-probabilities of whole prompts."""
        for context, continuation in requests:
            self._refuse_too_long(len(context) + len(continuation) + 1)
        asked = [(None, *request) for request in requests]
        for place, answer in enumerate(self.vllm._loglikelihood_tokens(asked, disable_tqdm=True)):
            scored(place, *answer)

    def _refuse_too_long(self, tokens: int) -> None:
        if tokens > self.vllm.max_length:
            raise PipelineError(
                f"eval.backend=vllm: a prompt with its answer has {tokens} tokens, but vLLM has"
                f" memory for {self.vllm.max_length}. Lower eval.batch_size, num_fewshot or"
                " eval.max_gen_toks."
            )

    def halving(self, work: Callable[[], Any]) -> NoReturn:
        """Raise PipelineError, because vLLM cannot run the harness' loop of transformers.

        Requests with other generation settings would need that loop.
        """
        raise PipelineError(
            "eval.backend=vllm passes on no generation settings of a task or of the model's"
            " generation_config.json, except an answer's length and its ends. Use eval.backend=hf."
        )


def backend(settings: Eval, scratch: Path) -> functools.partial[VllmBackend]:
    """Return a function that opens weights, as TorchBackend does."""
    return functools.partial(VllmBackend, scratch=scratch, share_prefix=settings.share_prefix)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions and settings of vLLM that change answers.

    Raises:
        PipelineError: vLLM is not installed.
    """
    installed = {name: package_version(name) for name in ("vllm", "torch", "transformers")}
    if installed["vllm"] == "absent":
        raise PipelineError(
            "eval.backend=vllm needs vLLM. Run pip install 'cross-lingual-merging[vllm]', or use"
            " eval.backend=hf."
        )
    invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0")
    return installed | {"batch_invariant": invariant, "computed_by": "lm_eval"}
