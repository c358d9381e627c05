"""Anthropic's Messages: schemas, and their translation to a chat request."""
