"""The backend that has vLLM compute, in a process of its own (vllm_engine.py). Merges are loaded into it live.

A merge is put together in memory, on the CPU, as for the other backend, and all of its tensors go through a pipe: in
modules that vLLM fuses (q, k and v; gate and up) a part alone would not arrive, without an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pipeline.errors import PipelineError
from pipeline.evaluate.backend import Tokens, without_weights
from pipeline.evaluate.decode import Ending, settings_beyond_greedy
from pipeline.evaluate.steps import Sampling
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.extras import vllm_engine
from pipeline.runs.provenance import environment_for

if TYPE_CHECKING:
    from pipeline.config.evaluation import Eval
    from pipeline.merge.live import Live
    from pipeline.merge.merge import Merging

Result = TypeVar("Result")
MOST_CHOICES = 128  # of logprob_token_ids
LARGER = 1.25  # factor of weights that no answer stays the same with
ROOM_ON_A_CPU = 2048  # tokens of a row
PROBE = "One, two, three: the sum of the first three numbers is"


class Engine:
    """vLLM's process with the model of a folder. `holds`: signatures of the tensors that it was last given."""

    def __init__(self, python: str | None, start: dict[str, Any]) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [python or sys.executable, vllm_engine.__file__], env=environment_for(python),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.close = weakref.finalize(self, end, self.process)
        self.start, self.holds = start, dict[str, Any]()
        self.max_length = int(self.ask("start", **start)["max_length"])

    def ask(self, task: str, tensors: Iterable[tuple[str, torch.Tensor]] = (), **asked: Any) -> dict[str, Any]:
        """The answer to a request that has one."""
        (answer,) = self.answers_to(task, tensors, **asked)
        return answer

    def answers_to(
        self, task: str, tensors: Iterable[tuple[str, torch.Tensor]] = (), **asked: Any
    ) -> Iterator[dict[str, Any]]:
        """The answers when they come, then the one that says that it is done."""
        assert self.process.stdin
        assert self.process.stdout
        done = False
        try:
            with contextlib.suppress(BrokenPipeError):  # it says why
                self._put({"do": task, **asked})
                for name, tensor in tensors:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    self._put({"name": name, "dtype": dtype, "shape": list(tensor.shape)})
                    self.process.stdin.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                self.process.stdin.flush()
            for line in self.process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    print(self._log()[-3000:], file=sys.stderr)
                    raise PipelineError(reason(answer["error"]))
                done = "done" in answer
                yield answer["done"] if done else answer
                if done:
                    return
            raise PipelineError(f"eval.backend=vllm: its process died ({self._last_words()}): score again")
        finally:
            if not done:  # what is left in the pipes is unknown
                self.close()

    def _put(self, line: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(line).encode() + b"\n")

    def _log(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace").strip()

    def _last_words(self) -> str:
        code, lines = self.process.wait(), self._log().splitlines()
        return f"exit status {code}" + (f": {lines[-1].strip()[:200]}" if lines else "")


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def reason(error: str) -> str:
    """What vLLM raised, with a remedy where one is known."""
    remedy = "its log is above; eval.backend=hf needs no vLLM"
    if "memory" in error.lower():
        remedy = "lower eval.batch_size, or free memory that other processes hold"
    elif "longer than" in error or "maximum model length" in error:
        remedy = "ask for fewer exemplars or shorter answers"
    return f"eval.backend=vllm: vLLM stopped ({error[:300]}), and nothing of this task was scored: {remedy}"


class VllmBackend:
    """A model in vLLM. See `Backend`. python: that has vLLM, None for this one. share_prefix: its prefix cache. suffix:
    drafts by suffix decoding (arXiv 2411.04975)."""

    def __init__(
        self, batch_size: int, dtype: str, weights: Merging | Path, python: str | None = None,
        share_prefix: bool = True, suffix: bool = False,
    ) -> None:  # fmt: skip
        self.batch_size, self.dtype, self.weights, self.python = batch_size, dtype, weights, python
        self.share_prefix, self.suffix = share_prefix, suffix
        self.live: Live | None = None
        self.model: Any = None
        self.steps = 0  # of its engine, for answers

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
                self.engine = Engine(self.python, self._settings(self.weights))
            else:
                self._load_merge(self.weights)
        return self.model

    def _load_merge(self, merge: Merging) -> None:
        """Into the process that has the merge before, where there is one."""
        from pipeline.merge.live import model_of

        self.live = live = model_of(merge, self.dtype, "cpu")
        self.model, self.tokenizer = live.model, live.tokenizer
        assert live.folder
        start = self._settings(live.folder)
        if not (live.served and live.served.close.alive and live.served.start == start):
            if live.served:
                live.served.close()
            live.served = self.engine = Engine(self.python, start)
            check_replacing(self, live)
            live.apply(merge)
        self.engine = live.served
        signatures = {name: merge.signature(name) for name in merge.names}
        if self.engine.holds != signatures:
            put_tensors(live)
            self.engine.holds = signatures

    def _settings(self, folder: Path) -> dict[str, Any]:
        """What vLLM's process is started with. On a CPU it keeps room for some tokens of each row, where it would take
        nearly all memory."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = str(self.model.dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        a_token = 2 * config.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2)
        return {
            "folder": str(folder), "tokenizer": self.tokenizer.name_or_path, "dtype": dtype, "rows": self.batch_size,
            "share_prefix": self.share_prefix, "suffix": self.suffix,
            "cache_bytes": self.batch_size * ROOM_ON_A_CPU * a_token,
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------- answers

    def can_share(self) -> bool:
        return True

    def can_generate(self) -> bool:
        return True

    def generate(
        self, prompts: Sequence[Tokens], ending: Ending, share: bool, ended: Callable[[int, list[int]], None],
        sampling: Sampling | None = None,
    ) -> None:  # fmt: skip
        """vLLM decides by itself what is computed once, drafts from its own answers, and draws by a seed for each."""
        how: dict[str, Any] = {}
        if sampling:
            seeds = [sampling.seed(place) for place in range(len(prompts))]
            how = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seeds": seeds}
        self._refuse_too_long(max(map(len, prompts)) + ending.room)
        inputs, stop = [list(prompt) for prompt in prompts], list(ending.stop)
        answers = self.engine.answers_to(
            "generate", prompts=inputs, ends=sorted(ending.ends), stop=stop, room=ending.room, **how
        )
        for answer in answers:
            if "tokens" in answer:
                ended(answer["place"], answer["tokens"])
            else:
                self.steps += answer["steps"]

    def loglikelihood(
        self, requests: Sequence[tuple[Tokens, Tokens]], share: bool, scored: Callable[[int, float, bool], None]
    ) -> None:
        """A continuation of one token is a choice of its context, and all choices of a context are one request. For a
        longer one vLLM reads the prompt without its prefix cache. With drafts vLLM has no choices, and gives none
        without an error."""
        self._refuse_too_long(max(len(context) + len(continuation) for context, continuation in requests))
        choices: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # context -> places, and the token of each
        whole: list[int] = []
        for place, (context, continuation) in enumerate(requests):
            if self.suffix or len(continuation) > 1:
                whole.append(place)
            else:
                choices.setdefault(tuple(context), []).append((place, continuation[0]))
        batches = [(prompt, pairs[at : at + MOST_CHOICES]) for prompt, pairs in choices.items()
                 for at in range(0, len(pairs), MOST_CHOICES)]  # fmt: skip
        prompts = [list(prompt) for prompt, _ in batches]
        tokens = [[token for _, token in pairs] for _, pairs in batches]
        for answer in self.engine.answers_to("choose", prompts=prompts, choices=tokens):
            if "found" in answer:
                for (place, token), logprob in zip(batches[answer["place"]][1], answer["found"], strict=True):
                    scored(place, logprob, token == answer["greedy"])
        prompts = [[*requests[place][0], *requests[place][1]] for place in whole]
        lengths = [len(requests[place][1]) for place in whole]
        for answer in self.engine.answers_to("weigh", prompts=prompts, lengths=lengths):
            if "found" in answer:
                scored(whole[answer["place"]], sum(answer["found"]), all(answer["greedy"]))

    def _refuse_too_long(self, longest: int) -> None:
        if longest > self.engine.max_length:
            raise PipelineError(
                f"eval.backend=vllm: a prompt with its answer has {longest} tokens, and vLLM has memory for "
                f"{self.engine.max_length}: lower eval.batch_size, or ask for fewer exemplars or shorter answers"
            )

    def halving(self, work: Callable[[], Result]) -> Result:
        """vLLM decides by itself how many rows its memory holds."""
        return work()


# ---------------------------------------------------------------------------------------------------- live merges


def check_replacing(backend: VllmBackend, live: Live) -> None:
    """Once for each process: replace all weights by larger ones, which no answer stays the same with.

    Raises PipelineError where likelihoods are not those of torch, so that something was not replaced.
    """
    live.holds.clear()  # what is done to its weights here is not a merge
    for parameter in live.model.parameters():
        parameter.data *= LARGER
    put_tensors(live)
    tokens = live.tokenizer(PROBE).input_ids
    requests = [(tokens[:at], tokens[at : at + 1]) for at in range(1, len(tokens))]
    ours: dict[int, float] = {}
    torchs: dict[int, float] = {}
    backend.loglikelihood(requests, True, lambda place, value, _: ours.update({place: value}))
    TorchBackend(1, model=live.model).loglikelihood(
        requests, False, lambda place, value, _: torchs.update({place: value})
    )
    differs = max(abs(ours[place] - torchs[place]) for place in torchs)
    if differs > (0.01 if live.model.dtype == torch.float32 else 0.5):
        live.served.close()
        raise PipelineError(
            f"eval.backend=vllm: vLLM does not replace all weights of {live.folder}: write the merge with stage=merge "
            "and score it with checkpoint=RUN, or use eval.backend=hf"
        )


def put_tensors(live: Live) -> None:
    parameters = dict(live.model.named_parameters())
    live.served.ask("load", ((name, parameter.data) for name, parameter in parameters.items()), names=list(parameters))


VERSIONS = """
import importlib.metadata as metadata, json
found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
names = "vllm", "torch", "transformers", "arctic-inference"
print(json.dumps({name: found[name] for name in names if name in found}))
"""
OLDEST_VLLM = (0, 32)  # with which live merges were compared with written ones


def versions(settings: Eval) -> dict[str, str]:
    """What of vLLM changes answers, of the Python that the settings name."""
    return vllm_versions(settings.vllm_python, settings.vllm_suffix)


def backend(settings: Eval) -> functools.partial[VllmBackend]:
    """What opens weights, as TorchBackend does."""
    share, suffix = settings.share_prefix, settings.vllm_suffix
    return functools.partial(VllmBackend, python=settings.vllm_python, share_prefix=share, suffix=suffix)


@functools.cache
def vllm_versions(python: str | None, suffix: bool = False) -> dict[str, str]:
    """Versions of vLLM and of what it computes with, in the Python of eval.vllm_python (None: this one). suffix: drafts
    by suffix decoding.

    Raises PipelineError where there is no vLLM, one that is too old, or not what suffix decoding needs.
    """
    named = f"eval.vllm_python={python}" if python else "this Python"
    try:
        process = subprocess.run(
            [python or sys.executable, "-c", VERSIONS], env=environment_for(python), capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PipelineError(
            f"eval.vllm_python={python} cannot be run ({error}): give the path of a Python with vLLM"
        ) from error
    versions = json.loads(process.stdout or "{}")
    if "vllm" not in versions:
        raise PipelineError(
            f"eval.backend=vllm needs vLLM, which {named} does not have: pip install vllm, name a Python that has it "
            "with eval.vllm_python=PATH, or use eval.backend=hf"
        )
    arctic = versions.pop("arctic-inference", None)
    if suffix and not arctic:
        raise PipelineError(
            f"eval.vllm_suffix=true: {named} lacks arctic-inference: pip install arctic-inference==0.1.1"
        )
    if tuple(map(int, versions["vllm"].split(".")[:2])) < OLDEST_VLLM:
        raise PipelineError(
            f"eval.backend=vllm: {named} has vLLM {versions['vllm']}, too old to replace weights: install 0.32 or later"
        )
    versions |= {"arctic-inference": arctic} if suffix else {}
    return versions | {"batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0")}
