"""The `llaisys` command: one file per command, each with `add_parser(commands)` and `run(arguments) ->
int`."""
