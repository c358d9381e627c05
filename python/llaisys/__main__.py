"""`python -m llaisys` is `llaisys`."""

import sys

from llaisys.cli.main import main

sys.exit(main())
