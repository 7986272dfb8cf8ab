"""Starts SGLang 0.5.23 on a machine without a GPU: launch_cpu.py --model-path DIR --device cpu ... (SGLang's flags).

PyPI has no CPU build of two things SGLang imports unconditionally. Neither is called for a plain decoder with
torch-native attention, so names that raise when used stand in for both: the kernel package, and the operators that
torchvision registers from its CUDA extension. SGLang's workers spawn this file again, so they get the same names.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def stand_in_for_kernels() -> None:
    """Register `sgl_kernel` as a package any attribute of which is a function that raises."""

    def missing(name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_args: object, **_kwargs: object) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} has no CPU build on PyPI")

        return refuse

    package = types.ModuleType("sgl_kernel")
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    package.__getattr__ = missing  # type: ignore[method-assign]  # PEP 562: attributes of a module
    sys.modules["sgl_kernel"] = package


def declare_torchvision_operators() -> object:
    """Declare the operators torchvision refers to at import. The returned library must stay alive."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + _OPERATOR)
    return library


stand_in_for_kernels()
_torchvision = declare_torchvision_operators()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
