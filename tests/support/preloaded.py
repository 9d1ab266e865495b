"""What all commands share. The server of forked.py imports this module before it forks."""

import transformers.models.llama  # noqa: F401

import forked  # noqa: F401
import sortedrl.cli.output
import sortedrl.training.trainer  # noqa: F401
import toy  # noqa: F401
from sortedrl.cli import compare, plan, simulate, train  # noqa: F401
from sortedrl.cli.parse import parsed

parsed(train.SETTINGS, [], "sortedrl train")  # the first one takes twice as long

import frozen  # noqa: E402, F401 (the last)
