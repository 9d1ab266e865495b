"""The scheduler: the algorithm of the paper and what we add to it. Standard library only."""

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.controller import Batch, Controller, StaleTokens
from sortedrl.core.engine import (
    UNCHANGED,
    Change,
    Engine,
    EngineDied,
    EngineSpec,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Sampling,
    Tokens,
)
from sortedrl.core.events import Event, EventLog
from sortedrl.core.expectation import Expectation, SensedLengths
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import RejectionWatch, TooManyRejected
from sortedrl.core.rollout import Prompt, Rollout, Segment, State
from sortedrl.core.schedule import Schedule
from sortedrl.core.scoring import Score, ScoreAtOnce, Scorer
from sortedrl.core.strategies.base import SchedulerState, Strategy
from sortedrl.core.strategies.registry import STRATEGIES, strategy_named
from sortedrl.core.turns import Answer, Environments

__all__ = [
    "STRATEGIES",
    "UNCHANGED",
    "Answer",
    "Batch",
    "Change",
    "ConfigurationError",
    "Controller",
    "Engine",
    "EngineDied",
    "EngineSpec",
    "Environments",
    "Event",
    "EventLog",
    "Expectation",
    "Prompt",
    "Prompts",
    "RejectionWatch",
    "Request",
    "RequestFailed",
    "RequestFinished",
    "RequestPreempted",
    "RequestStarted",
    "Rollout",
    "Sampling",
    "Schedule",
    "SchedulerState",
    "Score",
    "ScoreAtOnce",
    "Scorer",
    "Segment",
    "SensedLengths",
    "StaleTokens",
    "State",
    "Strategy",
    "Tokens",
    "TooManyRejected",
    "strategy_named",
]
