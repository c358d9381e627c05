"""Text and token ids: tokenizers, chat templates, streams. Values in, values out; no engine, no server."""
