"""`llaisys bench`: load on any OpenAI-compatible server, and on the engine alone. Figures are vLLM's."""
