def resolve_chat_template(**settings):
    """Return None: the template is the tokenizer's own."""
