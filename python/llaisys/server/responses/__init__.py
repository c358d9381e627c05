"""OpenAI's Responses protocol: a view of a chat request, with a store of responses and background runs."""
