"""Sends weights to a vLLM server on other GPUs of this machine by NCCL: the learner is rank 0, the workers follow.

Only vLLM's own classes make the group and broadcast, so the learner's process needs vLLM as well. A broadcast ends only
when all ranks take part in it. So each call of the server and our part of it run at the same time, and an error of the
call ends both: the thread that is still in NCCL is left behind.

Not run on GPUs yet. The tests run vLLM's own rendezvous and its workers' code without NCCL.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

HOST = "127.0.0.1"
OWN_PART_SECONDS = 60.0
Result = TypeVar("Result")


def can_broadcast() -> bool:
    return find_spec("vllm") is not None


@dataclass(frozen=True)
class WeightBroadcast:
    """Weights that are on one GPU, under their Hugging Face names."""

    weights: Mapping[str, Any]

    def update_info(self) -> dict[str, Any]:
        """What vLLM's workers expect, in this order."""
        return {
            "names": list(self.weights),
            "dtype_names": [str(tensor.dtype).rpartition(".")[2] for tensor in self.weights.values()],
            "shapes": [list(tensor.shape) for tensor in self.weights.values()],
        }

    @property
    def device(self) -> Any:
        return next(iter(self.weights.values())).device


class BroadcastGroup:
    """The learner and the `workers` of one server. It lasts as long as the server's process."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._communicator: Any = None

    async def open(self, device: Any, init: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
        """Join the group; `init` makes the server's workers join it."""
        if self._communicator is not None:
            return
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = int(free.getsockname()[1])
        size = 1 + self._workers
        info = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": size}
        self._communicator = await _both(init(info), lambda: _communicator(port, size, device))

    async def send(self, source: WeightBroadcast, receive: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
        """Broadcast every weight; `receive` makes the server's workers take part."""
        communicator = self._communicator
        await _both(receive(source.update_info()), lambda: _broadcast(communicator, source))


def _communicator(port: int, size: int, device: Any) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    return PyNcclCommunicator(StatelessProcessGroup.create(HOST, port, rank=0, world_size=size), device=device)


def _broadcast(communicator: Any, source: WeightBroadcast) -> None:
    import torch

    with torch.cuda.device(source.device):
        stream = torch.cuda.current_stream()
        sent = [tensor.detach().contiguous() for tensor in source.weights.values()]  # exist until NCCL has read them
        for tensor in sent:
            communicator.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()


async def _both(call: Awaitable[Any], work: Callable[[], Result]) -> Result:
    """The result of `work`, which runs in a thread while the server handles `call`. An error of either one ends it."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    outcome.set_running_or_notify_cancel()  # from now on it cannot be canceled: NCCL does not end
    threading.Thread(target=run, name="weight broadcast", daemon=True).start()
    done, answer = asyncio.wrap_future(outcome), asyncio.ensure_future(call)
    try:
        await asyncio.wait((answer, done), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            done.result()
            await answer
        answer.result()
        # The server has done its part, so ours cannot take long. A rank that is gone would hang us.
        return await asyncio.wait_for(done, OWN_PART_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"the learner's part did not end within {OWN_PART_SECONDS:g} s after the server's") from None
    finally:
        answer.cancel()
        done.cancel()
