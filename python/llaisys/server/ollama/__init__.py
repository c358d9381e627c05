"""Ollama's API: schemas, and their translation to a chat request."""
