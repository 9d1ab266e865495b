"""On ARM, SGLang calls its compiled kernels without checking for them. As x86 without AMX it uses its PyTorch code."""

import platform

if platform.machine() in ("aarch64", "arm64"):
    platform.machine = lambda: "x86_64"
