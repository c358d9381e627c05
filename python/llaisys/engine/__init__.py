"""The engine: token ids in, token ids out. `LLMEngine` (engine.py) runs steps on one thread, which owns it.

Pure modules, values in and values out: `scheduler`, `request`, `request_queue`, `limits`, `prefix_cache`,
`kv_cache_planner`. `worker` is the only importer of the compiled core.
"""
