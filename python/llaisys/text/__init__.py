"""Text and token ids: tokenizers, chat templates, detokenization and parsers. Imports no engine or server."""
