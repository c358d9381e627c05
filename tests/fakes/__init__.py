"""Fakes: a core whose model is a hash, engines and services on it, a clock, a watchdog, a hub."""
