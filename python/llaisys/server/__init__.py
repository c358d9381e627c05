"""The HTTP server: the OpenAI-compatible API, probes, metrics and the web UI. No engine code is here."""
