"""SortedRL: an online length-aware scheduler for reinforcement learning on language models."""

from sortedrl.core import Batch, Controller, Prompt, Prompts, Rollout, Schedule

__version__ = "0.3.0"
__all__ = ["Batch", "Controller", "Prompt", "Prompts", "Rollout", "Schedule", "__version__"]
