"""What all commands share. The server of forked.py imports this module before it forks."""

import torch.utils.serialization.config  # noqa: F401
import transformers.generation.utils
import transformers.models.llama.modeling_llama
import transformers.tokenization_python  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import forked  # noqa: F401
import sortedrl.cli.output
import sortedrl.training.trainer  # noqa: F401
import toy  # noqa: F401
from sortedrl.cli import compare, plan, simulate, train  # noqa: F401
from sortedrl.cli.parse import parsed

parsed(train.SETTINGS, [], "sortedrl train")  # the first one takes twice as long
get_checkpoint_conversion_mapping("llama")  # the first one compiles 800 regular expressions, for all models

import frozen  # noqa: E402, F401 (the last)
