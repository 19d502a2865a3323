from transformers import AutoTokenizer


def get_tokenizer(name, **settings):
    return AutoTokenizer.from_pretrained(name)
