"""Does a process end with torch's warning about shared CUDA tensors after it exported weights by CUDA IPC?

    python benchmarks/ipc_exit.py           one GPU, 20 s: as before, and with storages of their own

Another process opens and releases the exported tensor, and the exporting one ends while its parameter still exists, as
a learner does. Before, torch counted such a parameter as in use by the other process.
"""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys

WARNING = "Producer process has been terminated"


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


def main() -> None:
    for way in ("before", "own storages"):
        done = subprocess.run([sys.executable, __file__, way], stderr=subprocess.PIPE, text=True, check=False)
        print(f"{way}: exit code {done.returncode}, {done.stderr.count(WARNING)} warnings", flush=True)
        if done.returncode:
            print(done.stderr[-2000:])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "read":
        read()
    else:
        export(sys.argv[1])
