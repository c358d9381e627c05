"""ASGI middleware: checks of a request before its route runs."""
