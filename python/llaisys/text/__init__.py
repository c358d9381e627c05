"""Text and token ids: tokenizers, chat templates, detokenization, parsers. Independent of engine and
server."""
