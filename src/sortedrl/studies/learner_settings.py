"""The learner of a simulated run: how long it takes, where it runs, and what a weight update costs."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from sortedrl.core.configuration import ConfigurationError


class SimulatedLearnerSettings(BaseModel):
    help_group: ClassVar[str] = "simulated learner"

    learner_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            description="learner time for an update of --rollouts-per-update responses of mean length; larger updates "
            "take longer in proportion to their tokens",
        ),
    ] = None
    learner_seconds_per_update: Annotated[float, Field(ge=0, description="fixed part of a learner step")] = 0.0
    learner_seconds_per_token: Annotated[float, Field(ge=0, description="learner time per trained token")] = 0.0
    separate_learner: Annotated[
        bool,
        Field(
            description="the learner has GPUs of its own: modes that keep tokens generate while it steps (--overlap), "
            "in the others it works on the coming update during the harvest (--stream)"
        ),
    ] = False
    stream: Annotated[
        bool,
        Field(description="the learner works on the coming update during the harvest, on its own device"),
    ] = False
    share_gpu: Annotated[
        bool, Field(description="with --stream: on the engine's GPU, at the speeds measured on an H200")
    ] = False
    weight_update_seconds: Annotated[
        float | None, Field(ge=0, description="seconds per weight update; default: as measured by the profile, or 0")
    ] = None
    weights_gb: Annotated[
        float | None,
        Field(gt=0, description="size of the weights in GB: with --weights-gb-per-second, the time of a weight update"),
    ] = None
    weights_gb_per_second: Annotated[
        float | None, Field(gt=0, description="bandwidth from the learner to each engine, all engines at once")
    ] = None


def weight_transfer_seconds(settings: SimulatedLearnerSettings) -> float | None:
    """As set, or by size and bandwidth."""
    size, bandwidth = settings.weights_gb, settings.weights_gb_per_second
    return settings.weight_update_seconds if size is None or bandwidth is None else size / bandwidth


def check_learner(settings: SimulatedLearnerSettings) -> None:
    per_token, size = settings.learner_seconds_per_token, settings.weights_gb
    is_set, is_separate = settings.learner_seconds is not None, settings.separate_learner
    rules = (  # key, whether its value is wrong, why, and the fix
        ("learner_seconds", is_set and (per_token or settings.learner_seconds_per_update),
         "it is the whole time of the learner, and a part of it is set, too",
         "Leave it out, or leave out --learner-seconds-per-token and --learner-seconds-per-update."),
        ("share_gpu", settings.share_gpu and is_separate, "with --separate-learner, no GPU is shared", "Leave it out."),
        ("share_gpu", settings.share_gpu and not settings.stream, "without --stream, engine and learner take turns",
         "Set --stream too, or leave it out."),
        ("stream", settings.stream and not (per_token or settings.learner_seconds),
         "the learner's work per token is not set, so there is nothing to do during the harvest",
         "Set --learner-seconds, for example 60."),
        ("weights_gb", (size is None) != (settings.weights_gb_per_second is None),
         "it takes both a size and a bandwidth", "Set both, or leave out both."),
        ("weight_update_seconds", size is not None and settings.weight_update_seconds is not None,
         "size and bandwidth of the weights give another time", "Leave it out, or leave out --weights-gb."),
    )  # fmt: skip
    for key, is_wrong, why, fix in rules:
        if is_wrong:
            raise ConfigurationError(key, getattr(settings, key), why, fix)
