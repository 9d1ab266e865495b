"""SortedRL: an online length-aware scheduler for reinforcement learning on language models.

Names are imported when they are first used: the scheduler needs the standard library alone, `Learner` PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sortedrl.core import Batch as Batch
    from sortedrl.core import Controller as Controller
    from sortedrl.core import Prompt as Prompt
    from sortedrl.core import Prompts as Prompts
    from sortedrl.core import Rollout as Rollout
    from sortedrl.core import Schedule as Schedule
    from sortedrl.core import ScoreAtOnce as ScoreAtOnce
    from sortedrl.engines.embedded.engine import EmbeddedEngine as EmbeddedEngine
    from sortedrl.engines.servers.sglang import SglangEngine as SglangEngine
    from sortedrl.engines.servers.vllm import VllmServerEngine as VllmServerEngine
    from sortedrl.engines.vllm import VllmEngine as VllmEngine
    from sortedrl.learner.learner import Learner as Learner
    from sortedrl.learner.settings import LearnerSettings as LearnerSettings
    from sortedrl.log import Recorder as Recorder
    from sortedrl.tasks.scoring import BackgroundScorer as BackgroundScorer

_MODULES = {
    **dict.fromkeys(("Batch", "Controller", "Prompt", "Prompts", "Rollout", "Schedule", "ScoreAtOnce"), "core"),
    "BackgroundScorer": "tasks.scoring",
    "EmbeddedEngine": "engines.embedded.engine",
    "Learner": "learner.learner",
    "LearnerSettings": "learner.settings",
    "Recorder": "log",
    "SglangEngine": "engines.servers.sglang",
    "VllmEngine": "engines.vllm",
    "VllmServerEngine": "engines.servers.vllm",
}
__version__ = "0.3.0"
__all__ = [*sorted(_MODULES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sortedrl' has no attribute {name!r}")
    return getattr(import_module(f"sortedrl.{_MODULES[name]}"), name)
