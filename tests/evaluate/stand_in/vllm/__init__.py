"""As much of vLLM as extras/vllm_backend.py uses, computed by transformers, one token of one prompt at a time."""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def TokensPrompt(prompt_token_ids):  # noqa: N802
    return prompt_token_ids


def SamplingParams(**settings):  # noqa: N802
    return SimpleNamespace(
        **({"stop": [], "stop_token_ids": [], "prompt_logprobs": None, "seed": None, "top_p": 1} | settings)
    )


class LLM:
    def __init__(self, model, tokenizer, dtype, **settings):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model.packed_modules_mapping = PARTS
        self.tokenizer, self.waiting, self.llm_engine = AutoTokenizer.from_pretrained(tokenizer), [], self
        longest = self.model.config.max_position_embeddings
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))

    def apply_model(self, function):
        return [function(self.model)]

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        parameters = dict(self.model.named_parameters())
        for name, tensor in kwargs["weights_iterator"]:
            parameters[name].data.copy_(tensor)

    def reset_prefix_cache(self):
        return True

    def add_request(self, name, prompt, params):
        self.waiting.append((name, prompt, params))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    @torch.no_grad()
    def step(self):
        """The last request that was added, answered."""
        name, prompt, params = self.waiting.pop()
        tokens, reason = list(prompt), "length"
        draw = torch.Generator().manual_seed(params.seed or 0)
        cache, told, new = None, None, tokens
        while len(tokens) < len(prompt) + params.max_tokens and reason == "length":
            out = self.model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache, every = out.past_key_values, torch.log_softmax(out.logits[0].double(), -1)
            told = every if told is None else told  # of the prompt
            shares, order = torch.softmax(every[-1] / (params.temperature or 1), -1).sort(descending=True)
            shares[shares.cumsum(0) - shares >= params.top_p] = 0
            tokens.append(int(order[torch.multinomial(shares, 1, generator=draw) if params.temperature else 0]))
            new, text = tokens[-1:], self.tokenizer.decode(tokens[len(prompt) :])
            if tokens[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
                reason = "stop"
        found = [SimpleNamespace(logprob=float(one)) for one in every[-1]]
        answer = SimpleNamespace(token_ids=tokens[len(prompt) :], finish_reason=reason, logprobs=[found])
        before = [None] + [
            {token: SimpleNamespace(logprob=float(row[token]), rank=int((row > row[token]).sum()) + 1)}
            for row, token in zip(told, prompt[1:], strict=False)
        ]
        return [SimpleNamespace(request_id=name, finished=True, outputs=[answer], prompt_logprobs=before)]
