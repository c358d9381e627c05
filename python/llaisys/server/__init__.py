"""HTTP and nothing else: the OpenAI-compatible API, the probes, the metrics and the page."""
