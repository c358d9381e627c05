"""LLAISYS: LLM inference and serving."""
