"""The engine: token ids in, token ids out. `LLMEngine` (engine.py) runs steps on one thread, which owns it.

The scheduler and what it uses are pure (values in, values out): `scheduler`, `request`, `request_queue`,
`queue_limits`, `limits`, `client_shares`, `prefix_cache` and `kv_cache_planner`. import-linter checks this,
and the other pure modules (pyproject.toml). `worker` is the only importer of the compiled core.
"""
