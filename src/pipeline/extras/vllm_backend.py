"""The backend that has vLLM compute, in this process. Merges are loaded into it live.

A merge is put together in memory, on the CPU, as for the other backend, and the layers of which a tensor changed are
handed over whole: of modules that vLLM fuses (q, k and v; gate and up) a part alone would not arrive, without an error.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pipeline.errors import PipelineError
from pipeline.evaluate.backend import Tokens, without_weights
from pipeline.evaluate.decode import Ending, settings_beyond_greedy
from pipeline.evaluate.steps import Sampling
from pipeline.evaluate.torch_backend import TorchBackend, most_rows
from pipeline.models.names import tensor_names
from pipeline.runs.provenance import package_version
from pipeline.text import one_line

if TYPE_CHECKING:
    from pipeline.config.evaluation import Eval
    from pipeline.merge.live import Live
    from pipeline.merge.merge import Merging

Result = TypeVar("Result")
MOST_CHOICES = 128  # of logprob_token_ids
PROBE = "One, two, three: the sum of the first three numbers is"
SETTINGS = {  # of vLLM, unless the environment has others
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB of keys and values, where it would take nearly all memory
}


class Engine:
    """vLLM with the model of a folder. `start`: keywords of vllm.LLM; `holds`: signatures of the tensors that it was
    last given. What fails in it closes it: requests that are left in it would be answered among the next."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.llm: Any = None
        self.start, self.holds = start, dict[str, Any]()
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        with self.closing_where_it_fails():
            import vllm
            from vllm.platforms import current_platform

            eager = current_platform.is_cpu()
            self.llm = vllm.LLM(**start, enforce_eager=eager, max_model_len=-1, disable_log_stats=True, seed=0)
            self.max_length = int(self.llm.llm_engine.vllm_config.model_config.max_model_len)

    @contextmanager
    def closing_where_it_fails(self) -> Iterator[None]:
        """Whatever vLLM raises is a PipelineError with a remedy."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, PipelineError) or not isinstance(error, Exception):
                raise
            traceback.print_exc(file=sys.stderr)
            text = one_line(str(error)) or "no message"
            raise PipelineError(reason(f"{type(error).__name__}: {text}")) from error

    def close(self) -> None:
        """Free the memory of weights, keys and values."""
        self.llm = None
        if "vllm.distributed" in sys.modules:
            sys.modules["vllm.distributed"].cleanup_dist_env_and_memory()
        gc.collect()

    def take(self, live: Live) -> None:
        """Replace the layers of which a tensor is not what vLLM holds, whole: of a fused module a part alone would be
        wrong unnoticed. What is in no layer is replaced by itself."""
        state = live.model.state_dict()
        names = tensor_names(state)
        changed = {layer_of(own) for own, name in names.items() if self.holds.get(name) != live.holds.get(name)}
        tensors = [(own, state[own]) for own in names if layer_of(own) in changed]
        if not tensors:
            return
        with self.closing_where_it_fails():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
            self.llm.apply_model(pack_head)
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not empty its prefix cache, which holds values of the weights before")
        self.holds = dict(live.holds)

    def outputs(self, prompts: Sequence[Tokens], how: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Any]]:
        """(place, output) of each prompt when it is finished. Settings of generation_config.json are not used."""
        with self.closing_where_it_fails():
            from vllm import SamplingParams, TokensPrompt

            engine = self.llm.llm_engine
            for place, (prompt, settings) in enumerate(zip(prompts, how, strict=True)):
                params = SamplingParams(**{"temperature": 0, "ignore_eos": True, **settings})
                engine.add_request(str(place), TokensPrompt(prompt_token_ids=list(prompt)), params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield int(output.request_id), output


def pack_head(model: Any) -> None:
    """On a CPU, a head that is tied to the embeddings has a packed copy, which vLLM keeps when these are replaced."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def reason(error: str) -> str:
    """What vLLM raised, with a remedy where one is known."""
    remedy = "its log is above; eval.backend=hf needs no vLLM"
    if "memory" in error.lower():
        remedy = "lower eval.batch_size, or free memory that other processes hold"
    return f"eval.backend=vllm: vLLM stopped ({error[:300]}), and nothing of this task was scored: {remedy}"


class VllmBackend:
    """A model in vLLM. share_prefix: its prefix cache."""

    halved = False  # vLLM decides by itself how many rows its memory holds
    has_queue = True

    def __init__(self, batch_size: int | None, dtype: str, weights: Merging | Path, share_prefix: bool = True) -> None:
        self.batch_size, self.dtype, self.weights = most_rows(batch_size), dtype, weights
        self.share_prefix = share_prefix
        self.model: Any = None

    # --------------------------------------------------------------------------------------------------- weights

    def load(self) -> Any:
        """As TorchBackend's, but for the model in memory, which stays on the CPU; of a folder it has no weights."""
        if self.model is None:
            self.model, self.tokenizer = without_weights(self.weights)
            if settings := settings_beyond_greedy(self.model):
                raise PipelineError(
                    f"eval.backend=vllm: the model's generation_config.json sets {settings[0]}, which is not passed on "
                    "to vLLM: score it with eval.backend=hf"
                )
            if isinstance(self.weights, Path):
                self.engine = Engine(self._start(self.weights, "safetensors"))
            else:
                self._load_merge(self.weights)
        return self.model

    def _load_merge(self, merge: Merging) -> None:
        """Into the engine that has the merge before, where there is one."""
        from pipeline.merge.live import model_of

        live = model_of(merge, self.dtype, "cpu")
        self.model, self.tokenizer = live.model, live.tokenizer
        assert live.folder
        start = self._start(live.folder, "dummy")
        if is_new := not (live.served and live.served.llm and live.served.start == start):
            if live.served:
                live.served.close()
            live.served = Engine(start)
        self.engine = live.served
        self.engine.take(live)
        if is_new:
            check_replacing(self, live)

    def _start(self, folder: Path, load_format: str) -> dict[str, Any]:
        """What vLLM is started with; dummy: weights by chance."""
        dtype = str(self.model.dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        return {
            "model": str(folder), "load_format": load_format, "tokenizer": self.tokenizer.name_or_path, "dtype": dtype,
            "max_num_seqs": self.batch_size, "enable_prefix_caching": self.share_prefix,
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------- answers

    def can_share(self) -> bool:
        return True

    def can_generate(self) -> bool:
        return True

    def generate(
        self, prompts: Sequence[Tokens], endings: Sequence[Ending], share: bool,
        ended: Callable[[int, list[int]], None], sampling: Sampling | None = None,
    ) -> None:  # fmt: skip
        """vLLM decides by itself what is computed once, and draws by a seed for each."""
        how: list[dict[str, Any]] = [
            {
                "max_tokens": ending.room, "stop": [] if ending.think_end else list(ending.stop),
                "stop_token_ids": sorted(ending.ends),
                "skip_special_tokens": False,
            }
            for ending in endings
        ]  # fmt: skip
        if sampling:
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            how = [one | drawn | {"seed": sampling.seed(place)} for place, one in enumerate(how)]
        self._refuse_too_long(max(len(prompt) + ending.room for prompt, ending in zip(prompts, endings, strict=True)))
        for place, output in self.engine.outputs(prompts, how):
            ended(place, list(output.outputs[0].token_ids))

    def loglikelihood(
        self, requests: Sequence[tuple[Tokens, Tokens]], share: bool, scored: Callable[[int, float, bool], None]
    ) -> None:
        """A continuation of one token is a choice of its context, and the choices of a context are one request. For
        others vLLM reads the prompt without its prefix cache."""
        self._refuse_too_long(max(len(context) + len(continuation) for context, continuation in requests))
        choices: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)  # context -> place -> its token
        whole: list[int] = []
        for place, (context, continuation) in enumerate(requests):
            if len(continuation) == 1 and len(choices[tuple(context)]) < MOST_CHOICES:
                choices[tuple(context)][place] = continuation[0]
            else:
                whole.append(place)
        tokens_at = list(choices.values())
        how = [{"max_tokens": 1, "detokenize": False, "logprob_token_ids": [*some.values()]} for some in tokens_at]
        for at, output in self.engine.outputs([*choices], how):
            (logprobs,), (greedy,) = output.outputs[0].logprobs, output.outputs[0].token_ids
            for place, token in tokens_at[at].items():
                scored(place, logprobs[token].logprob, token == greedy)
        prompts = [[*requests[place][0], *requests[place][1]] for place in whole]
        weighed = {"max_tokens": 1, "detokenize": False, "prompt_logprobs": 0}
        for at, output in self.engine.outputs(prompts, [weighed] * len(prompts)):
            tokens = requests[whole[at]][1]
            found = [one[token] for one, token in zip(output.prompt_logprobs[-len(tokens) :], tokens, strict=True)]
            scored(whole[at], sum(one.logprob for one in found), all(one.rank == 1 for one in found))

    def _refuse_too_long(self, longest: int) -> None:
        if longest > self.engine.max_length:
            raise PipelineError(
                f"eval.backend=vllm: a prompt with its answer has {longest} tokens, and vLLM has memory for "
                f"{self.engine.max_length}: lower eval.batch_size, or ask for fewer exemplars or shorter answers"
            )

    def halving(self, work: Callable[[], Result]) -> Result:
        return work()


# ---------------------------------------------------------------------------------------------------- live merges


def check_replacing(backend: VllmBackend, live: Live) -> None:
    """Once for each engine, which began with weights by chance: raise PipelineError where likelihoods are not those of
    torch, so that something was not replaced."""
    tokens = live.tokenizer(PROBE).input_ids
    requests = [(tokens[:at], tokens[at : at + 1]) for at in range(1, len(tokens))]

    def scores(computing: Any) -> list[float]:
        found: dict[int, float] = {}
        computing.loglikelihood(requests, False, lambda place, value, _: found.update({place: value}))
        return [found[place] for place in range(len(requests))]

    pairs = zip(scores(backend), scores(TorchBackend(1, model=live.model)), strict=True)
    if max(abs(ours - torchs) for ours, torchs in pairs) > (0.01 if live.model.dtype == torch.float32 else 0.5):
        live.served.close()
        raise PipelineError(
            f"eval.backend=vllm: vLLM does not replace all weights of {live.folder}: write the merge with stage=merge "
            "and score it with checkpoint=RUN, or use eval.backend=hf"
        )


def layer_of(name: str) -> str:
    """model.layers.3 of all of its tensors; elsewhere the tensor's own name."""
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer[0] if layer else name


OLDEST_VLLM = (0, 32)  # with which live merges were compared with written ones


def backend(settings: Eval) -> functools.partial[VllmBackend]:
    """What opens weights, as TorchBackend does."""
    return functools.partial(VllmBackend, share_prefix=settings.share_prefix)


@functools.cache
def versions() -> dict[str, str]:
    """What of vLLM changes answers: its version, and those of what it computes with. Raises PipelineError where there
    is no vLLM, or one that is too old."""
    installed = {name: package_version(name) for name in ("vllm", "torch", "transformers")}
    if installed["vllm"] == "absent":
        raise PipelineError(
            "eval.backend=vllm needs vLLM: pip install 'cross-lingual-merging[vllm]', or use eval.backend=hf"
        )
    if tuple(map(int, installed["vllm"].split(".")[:2])) < OLDEST_VLLM:
        raise PipelineError(
            f"eval.backend=vllm: vLLM {installed['vllm']} is too old to replace weights: install 0.32 or later"
        )
    return installed | {"batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0")}
