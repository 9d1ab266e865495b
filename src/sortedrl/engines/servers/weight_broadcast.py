"""Sends weights to vLLM servers on other GPUs of this machine by NCCL, in one group: the learner is rank 0, and the
workers of all servers follow.

Only vLLM's own classes make the group and broadcast, so the learner's process needs vLLM as well. A broadcast ends only
when all ranks take part in it. So the servers of a pool wait for each other, their calls and our part run at the same
time, and an error of any of them ends all: the thread that is still in NCCL is left behind.

Never run on two GPUs. The tests run vLLM's own rendezvous and its workers' code without NCCL.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, TypeVar

from sortedrl.engines.servers.weight_handles import described

HOST = "127.0.0.1"
OWN_PART_SECONDS = 60.0
ARRIVAL_SECONDS = 180.0  # for all servers: longer than a busy one is tried again
Result = TypeVar("Result")


def can_broadcast() -> bool:
    return find_spec("vllm") is not None


@dataclass(frozen=True, eq=False)
class Receiver:
    """A server's process with so many workers. `transfer` calls a route of its weight transfer."""

    workers: int
    transfer: Callable[..., Awaitable[Any]]


class BroadcastGroup:
    """The learner and the receivers of the last broadcast. It lasts as long as these are the same processes."""

    def __init__(self) -> None:
        self._receivers: set[Receiver] = set()
        self._communicator: Any = None

    async def communicator(self, receivers: set[Receiver], device: Any) -> Any:
        if receivers != self._receivers:
            with socket.socket() as free:
                free.bind((HOST, 0))
                port = int(free.getsockname()[1])
            *offsets, size = accumulate((receiver.workers for receiver in receivers), initial=1)
            about = {"master_address": HOST, "master_port": port, "world_size": size}
            calls = [
                receiver.transfer("/init_weight_transfer_engine", init_info={**about, "rank_offset": offset})
                for receiver, offset in zip(receivers, offsets, strict=True)
            ]
            self._receivers = set()
            self._communicator = await _both(calls, lambda: _communicator(port, size, device))
            self._receivers = set(receivers)
        return self._communicator


class WeightBroadcast:
    """One broadcast of weights that are on one GPU, under their Hugging Face names, to so many servers."""

    def __init__(self, weights: Mapping[str, Any], group: BroadcastGroup, servers: int) -> None:
        self.weights = weights
        self.device = next(iter(weights.values())).device
        self._group = group
        self._servers = servers
        self._receivers: set[Receiver] = set()
        self._are_all_here = asyncio.Event()
        self._work: asyncio.Future[None] | None = None

    async def send_to(self, receiver: Receiver) -> None:
        """Wait for all servers, then send the weights to those that came. In the event loop, as `leave`."""
        if self._work is None:
            self._receivers.add(receiver)
            self._note_arrivals()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._are_all_here.wait(), ARRIVAL_SECONDS)
        if self._work is None:
            self._work = asyncio.ensure_future(self._send())
        if receiver not in self._receivers:
            raise TimeoutError("the other servers did not wait for it any longer")
        await asyncio.shield(self._work)

    def leave(self) -> None:
        """A server failed. The others go on without it if it was not waiting for them yet."""
        self._servers -= 1
        self._note_arrivals()

    def _note_arrivals(self) -> None:
        if len(self._receivers) >= self._servers:
            self._are_all_here.set()

    async def _send(self) -> None:
        receivers = self._receivers
        communicator = await self._group.communicator(receivers, self.device)
        await asyncio.gather(*(receiver.transfer("/start_weight_update") for receiver in receivers))
        info = described(self.weights)  # the workers expect them in this order
        calls = [receiver.transfer("/update_weights", update_info=info) for receiver in receivers]
        await _both(calls, lambda: _broadcast(communicator, self))
        await asyncio.gather(*(receiver.transfer("/finish_weight_update") for receiver in receivers))


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


async def _both(calls: Sequence[Awaitable[Any]], work: Callable[[], Result]) -> Result:
    """The result of `work`, which runs in a thread while servers handle the calls. An error of any one ends all."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    outcome.set_running_or_notify_cancel()  # from now on it cannot be canceled: NCCL does not end
    threading.Thread(target=run, name="weight broadcast", daemon=True).start()
    tasks = [asyncio.ensure_future(call) for call in calls]
    done, answer = asyncio.wrap_future(outcome), asyncio.gather(*tasks)
    try:
        await asyncio.wait((answer, done), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            done.result()
            await answer
        answer.result()
        # The servers have done their part, so ours cannot take long. A rank that is gone would hang us.
        return await asyncio.wait_for(done, OWN_PART_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"the learner's part did not end within {OWN_PART_SECONDS:g} s after the servers'") from None
    finally:
        for pending in (*tasks, done):
            pending.cancel()
