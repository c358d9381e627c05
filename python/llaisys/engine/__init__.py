"""The engine: ids in, ids out. `limits`, `request` and `scheduler` are pure; one thread owns the rest."""
