"""The `llaisys` command: one file a command, each with `add_parser(commands)` and `run(arguments) -> int`."""
