"""vLLM in a process and a Python of its own: started by vllm_backend.py, which asks through pipes. Imports no pipeline.

A request is one line of JSON on standard input, the bytes of tensors follow the line that announces them; answers are
lines on standard output, the last of which says `done` or `error`. Nothing is unpickled. The process ends with its
parent. Runs on Python 3.10 and later, with vLLM's own transformers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

sys.path.pop(0)  # this file's folder, whose modules are not vLLM's

SETTINGS = {  # of vLLM, unless the environment has others
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    """A vLLM model, and the pipe that questions and tensors come through."""

    def __init__(self, pipe, put):
        self.pipe, self.put = pipe, put
        self.steps = 0

    def start(self, folder, tokenizer, dtype, rows, share_prefix, cache_bytes, suffix=False):
        """Load a model. cache_bytes: of keys and values on a CPU, where vLLM would take most of the memory. suffix:
        draft from all answers of this process."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        how = {"enforce_eager": True} if cpu else {}
        if cpu and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            how["kv_cache_memory_bytes"] = cache_bytes
        if suffix:
            how |= {"speculative_config": {"method": "suffix"}}
        self.llm = vllm.LLM(
            model=folder, tokenizer=tokenizer, dtype=dtype, load_format="safetensors", max_num_seqs=rows,
            max_model_len=-1, enable_prefix_caching=share_prefix, disable_log_stats=True, seed=0, **how,
        )  # fmt: skip
        config = self.llm.llm_engine.vllm_config.model_config
        device = "cpu" if cpu else torch.cuda.get_device_name()
        return {"max_length": config.max_model_len, "device": device}

    def load(self, names):
        """Replace all tensors, whose values follow. A part of a fused module alone would be wrong unnoticed."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self.tensors(names)})
        self.llm.apply_model(pack_head)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache, which holds values of the weights before")
        return {}

    def tensors(self, names):
        import torch

        for name in names:
            head = json.loads(self.pipe.readline())
            assert head["name"] == name, (head, name)
            tensor = torch.empty(head["shape"], dtype=getattr(torch, head["dtype"]))
            data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            while data:
                taken = self.pipe.readinto(data)
                if not taken:
                    os._exit(1)
                data = data[taken:]
            yield name, tensor

    def generate(self, prompts, ends, stop, room, temperature=0, top_p=1, seeds=None):
        """Answers, each when it ends, at a token of `ends`, a string of `stop`, or after `room` tokens: greedy ones, or
        drawn with a seed for each."""
        how = {"max_tokens": room, "stop": stop, "stop_token_ids": ends, "skip_special_tokens": False}
        how |= {"temperature": temperature, "top_p": top_p}
        for place, output in self.outputs(prompts, [how | {"seed": seed} for seed in seeds or [None] * len(prompts)]):
            answer = output.outputs[0]
            self.put({"place": place, "tokens": list(answer.token_ids), "reason": answer.finish_reason})
        return {"steps": self.steps}

    def choose(self, prompts, choices):
        """Log-probabilities of each prompt's next token being each of its choices, and the likeliest of all tokens."""
        how = [{"max_tokens": 1, "logprob_token_ids": tokens, "detokenize": False} for tokens in choices]
        for place, output in self.outputs(prompts, how):
            (logprobs,), (greedy,) = output.outputs[0].logprobs, output.outputs[0].token_ids
            self.put({"place": place, "found": [logprobs[token].logprob for token in choices[place]], "greedy": greedy})
        return {}

    def weigh(self, prompts, lengths):
        """Log-probabilities of each prompt's last tokens, and whether each is the likeliest."""
        how = [{"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}] * len(prompts)
        for place, output in self.outputs(prompts, how):
            tokens = prompts[place][-lengths[place] :]
            logprobs = [at[token] for at, token in zip(output.prompt_logprobs[-len(tokens) :], tokens, strict=True)]
            self.put(
                {
                    "place": place,
                    "found": [logprob.logprob for logprob in logprobs],
                    "greedy": [logprob.rank == 1 for logprob in logprobs],
                }
            )
        return {}

    def outputs(self, prompts, how):
        """The output of each prompt when it is finished. Settings of generation_config.json are not used."""
        from vllm import SamplingParams, TokensPrompt

        engine, self.steps = self.llm.llm_engine, 0
        for place, (prompt, settings) in enumerate(zip(prompts, how, strict=True)):
            params = SamplingParams(**{"temperature": 0, "ignore_eos": True, **settings})
            engine.add_request(str(place), TokensPrompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            self.steps += 1
            for output in engine.step():
                if output.finished:
                    yield int(output.request_id), output


def pack_head(model):
    """On a CPU, a head that is tied to the embeddings has a packed copy, which vLLM keeps when these are replaced."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def end_with_parent(parent):
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main():
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints

    def put(answer):
        answers.write(json.dumps(answer) + "\n")

    pipe = os.fdopen(os.dup(0), "rb")
    engine = Engine(pipe, put)
    for line in iter(pipe.readline, b""):
        request = json.loads(line)
        try:
            put({"done": getattr(engine, request.pop("do"))(**request)})
        except Exception as error:  # vLLM raises of all kinds; what is left of the pipe is unknown
            import traceback

            traceback.print_exc()
            put({"error": type(error).__name__ + ": " + (" ".join(str(error).split()) or "no message")})
            os._exit(1)


if __name__ == "__main__":
    main()
