#!/usr/bin/env bash
# Print the exact versions in the virtual environment of $1, in the format of requirements.lock.
set -eu
echo "# Exact versions that 'make setup' installs and CI tests. Made by 'make lock'."
"$1" -m pip list --format=freeze | grep -vE '^(pip|setuptools|llaisys)==' \
  | sed -E 's/^(numpy==.*)/\1; python_version >= "3.11"/' | sort -f
