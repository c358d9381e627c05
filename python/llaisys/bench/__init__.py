"""`llaisys bench`: benchmarks of any OpenAI-compatible server and of the engine alone, with vLLM's
metrics."""
