"""The HTTP server: the OpenAI-compatible API, probes, metrics and the web UI.

`lifecycle` runs the process, `app` builds the ASGI application, `state` is what routes share. The engine is
used through `AsyncLLM` only.
"""
