"""A corpus of hostile clients: each case attacks a running server and says which replies are right.

`tests/e2e/test_attack.py` runs the cheap cases and counts; `make attack` (`benches/attack.py`) runs all of
them and measures what other clients notice.
"""
