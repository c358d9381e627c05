"""Text and token ids: tokenizers, chat templates, streams. Pure functions and values: they know neither the
engine nor the server."""
