"""Every setting is in one group, and `--help` shows the groups."""

from __future__ import annotations

import argparse
from collections import Counter

from llaisys.cli.config_flags import CLIENT_SETTINGS, add_config_flags, flag_of
from llaisys.config import GROUPS, Config


def test_each_setting_is_in_exactly_one_group() -> None:
    grouped = Counter(name for names in GROUPS.values() for name in names)
    assert grouped.keys() == Config.model_fields.keys()
    assert set(grouped.values()) == {1}


def test_help_has_the_settings_below_their_groups() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    text = parser.format_help()
    at = [text.index(f"\n{group}:\n") for group in GROUPS]
    assert at == sorted(at)
    for begin, end, names in zip(at, [*at[1:], len(text)], GROUPS.values(), strict=True):
        for name in names:
            assert f"\n  {flag_of(name)}" in text[begin:end], name


def test_a_command_with_few_settings_shows_no_empty_group() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, CLIENT_SETTINGS)
    text = parser.format_help()
    assert "\nmodel:\n" in text
    assert "\nnetwork:\n" not in text
