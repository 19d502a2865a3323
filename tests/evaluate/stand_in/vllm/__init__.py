"""As much of vLLM as lm_eval's class for it uses.

transformers computes one token of one prompt at a time.
"""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def TokensPrompt(prompt_token_ids):  # noqa: N802
    return prompt_token_ids


def SamplingParams(**settings):  # noqa: N802
    return SimpleNamespace(
        **({"stop": [], "stop_token_ids": [], "seed": None, "top_p": 1} | settings)
    )


class LLM:
    def __init__(self, model, tokenizer, dtype, **settings):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        longest = self.model.config.max_position_embeddings
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))

    def generate(self, prompts, sampling_params, **settings):
        return [
            self.answer(prompt, params)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    @torch.no_grad()
    def answer(self, prompt, params):
        tokens = list(prompt)
        draw = torch.Generator().manual_seed(params.seed or 0)
        cache, told, new = None, None, tokens
        while len(tokens) < len(prompt) + params.max_tokens:
            out = self.model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache, every = out.past_key_values, torch.log_softmax(out.logits[0].double(), -1)
            told = every if told is None else told  # of the prompt
            shares, order = torch.softmax(every[-1] / (params.temperature or 1), -1).sort(
                descending=True
            )
            shares[shares.cumsum(0) - shares >= params.top_p] = 0
            tokens.append(
                int(
                    order[torch.multinomial(shares, 1, generator=draw) if params.temperature else 0]
                )
            )
            new, text = tokens[-1:], self.tokenizer.decode(tokens[len(prompt) :])
            if tokens[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
                break
        before = [None]
        for row, token in zip(told, prompt[1:], strict=False):
            before.append({place: float(row[place]) for place in (int(row.argmax()), token)})
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tokens[len(prompt) :])], prompt_logprobs=before
        )
