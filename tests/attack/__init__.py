"""A corpus of hostile clients: each case attacks a running server and lists the allowed replies.

`tests/e2e/test_attack.py` runs the cheap cases. `make attack` (`benches/attack.py`) runs all of them and
measures the effect on other clients.
"""
