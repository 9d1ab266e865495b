"""What weights by CUDA IPC leave behind: torch's warning at exit, and events that the reading process never closes.

    python benchmarks/ipc_exit.py           one GPU, 40 s: each as before, and as it is now

Another process opens and releases the exported tensor, and the exporting one ends while its parameter still exists, as
a learner does. Before, torch counted such a parameter as in use by the other process. Then one process reads 300
tensors again and again, as a server of an 8B model does: before, with an event each that torch never closes.
"""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
import time

WARNING = "Producer process has been terminated"
TENSORS = 300
MOST_UPDATES = 200  # 60,000 events
SECONDS = 12.0


def read() -> None:
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    for arguments in pickle.load(sys.stdin.buffer):
        assert float(rebuild_cuda_tensor(*arguments).sum()) == 12.0  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


def export(way: str) -> None:
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    from sortedrl.engines.servers.weight_handles import exported

    parameter = torch.ones(3, 4, device="cuda")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parameter))  # it is never freed
    for _ in range(3):
        if way == "before":
            send([reduce_tensor(parameter)[1]])  # type: ignore[no-untyped-call]
            continue
        with exported({"weight": parameter}) as weights:
            send(weights.handles)


def send(handles: list[tuple[object, ...]]) -> None:
    subprocess.run([sys.executable, __file__, "read"], input=pickle.dumps(handles), check=True)


def read_updates() -> None:
    """Update after update, until the input ends."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    while True:
        try:
            handles = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        tensors = [rebuild_cuda_tensor(*arguments) for arguments in handles]  # type: ignore[no-untyped-call]
        torch.stack(tensors).sum().item()
        del tensors
        print("read", flush=True)


def update_often(way: str) -> None:
    import torch

    from sortedrl.engines.servers.weight_handles import exported

    weights = {str(i): torch.ones(1024, device="cuda") for i in range(TENSORS)}
    pipe = subprocess.PIPE
    reader = subprocess.Popen([sys.executable, __file__, "read updates"], stdin=pipe, stdout=pipe, stderr=pipe)
    assert reader.stdin is not None and reader.stdout is not None and reader.stderr is not None
    began, first, last, updates, reason = time.perf_counter(), 0.0, 0.0, 0, ""
    while updates < MOST_UPDATES and time.perf_counter() - began < SECONDS:
        with exported(weights) as sent:
            handles = [(*handle[:-1], True) for handle in sent.handles] if way == "with events" else sent.handles
            start = time.perf_counter()
            try:
                pickle.dump(handles, reader.stdin)
                reader.stdin.flush()
            except BrokenPipeError:
                pass
            if reader.stdout.readline() != b"read\n":
                reason = reader.stderr.read().decode()[-600:]
                break
            last = time.perf_counter() - start
        updates += 1
        if updates == 2:  # the first one starts CUDA
            first, began = last, time.perf_counter()
    free, total = torch.cuda.mem_get_info()
    print(f"{way}: {updates} updates of {TENSORS} tensors, the second in {1e3 * first:.1f} ms, the last in "
          f"{1e3 * last:.1f} ms, {(total - free) / 2**20:.0f} MiB in use", flush=True)  # fmt: skip
    if reason:
        print(f"the reader failed: {reason}", flush=True)
    reader.kill()


def main() -> None:
    for way in ("before", "own storages"):
        done = subprocess.run([sys.executable, __file__, way], stderr=subprocess.PIPE, text=True, check=False)
        print(f"{way}: exit code {done.returncode}, {done.stderr.count(WARNING)} warnings", flush=True)
        if done.returncode:
            print(done.stderr[-2000:])
    for way in ("with events", "without events"):
        subprocess.run([sys.executable, __file__, way], check=False)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "read":
        read()
    elif sys.argv[1] == "read updates":
        read_updates()
    elif sys.argv[1].endswith("events"):
        update_often(sys.argv[1])
    else:
        export(sys.argv[1])
