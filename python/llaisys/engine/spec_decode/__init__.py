"""Speculative decoding: proposers of draft tokens, the planner of their number, and the speculator that joins
them. Drafts change no token: the core verifies each with the request's own sampler."""
