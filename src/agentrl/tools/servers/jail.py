"""The inside of the `python` tool: restricts its own process for good, then runs `main.py` of the current folder.

Started by sandbox.py with `python -I`, the limits as JSON in argv. Needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import gc
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path

from agentrl.tools.servers.landlock import TRUNCATE_VERSION, landlock_version, restrict_files
from agentrl.tools.servers.seccomp import deny_system_calls

SCRIPT = "main.py"
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVS, _DROP_BOUNDING = 1, 4, 38, 24
_CAPABILITY_VERSION_3 = 0x20080522
_NEW_USER_NAMESPACE, _NEW_NETWORK_NAMESPACE = 0x10000000, 0x40000000
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/etc/localtime", "/etc/ld.so.cache", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Restrict this process and run the script; the exit code is the script's."""
    limits = json.loads(sys.argv[1])
    restrict(limits, folder=Path.cwd())
    sys.exit(_run_script())


def restrict(limits: Mapping[str, int], *, folder: Path) -> dict[str, bool]:
    """Give up everything the script must not have. Returns which of `network`, `processes` and `files` are isolated.

    What the kernel offers but refuses raises OSError: no script runs half isolated without notice.
    """
    _set_limits(limits)
    if sys.platform != "linux":
        return {"network": False, "processes": False, "files": False}
    # Only ever in addition: the namespace's network has no interface, and its powers are dropped at once.
    has_own_network = _libc.unshare(ctypes.c_int(_NEW_USER_NAMESPACE | _NEW_NETWORK_NAMESPACE)) == 0
    _drop_capabilities()
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))  # after the last change of credentials
    _libc.prctl(_SET_DUMPABLE, ctypes.c_ulong(0))
    _checked(_libc.prctl(_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))), "no_new_privs")
    writable = [folder, Path("/dev/null"), Path("/dev/zero")]
    has_own_files = restrict_files(readable=_readable(), writable=writable)
    has_filter = deny_system_calls(may_truncate=landlock_version() >= TRUNCATE_VERSION)
    return {"network": has_filter or has_own_network, "processes": has_filter, "files": has_own_files}


def _set_limits(limits: Mapping[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))  # SIGXCPU, then SIGKILL
    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        resource.setrlimit(kind, (value, value))


def _readable() -> list[Path]:
    """The interpreter, its packages and the system's libraries: neither /proc, home folders nor settings."""
    packages = [path for path in sys.path if path]
    folders = {*_SYSTEM_FOLDERS, sys.prefix, sys.base_prefix, *packages}
    return [Path(folder) for folder in sorted(folders)]


def _drop_capabilities() -> None:
    """Take root's powers; what root owns stays its own, as for any user."""
    for capability in range(64):
        _libc.prctl(_DROP_BOUNDING, ctypes.c_ulong(capability))  # beyond the last one it fails, which is fine
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _run_script() -> int:
    """Run the script as `__main__`; a traceback shows its frames alone."""
    module = types.ModuleType("__main__")
    module.__file__ = SCRIPT
    sys.modules["__main__"] = module
    sys.argv = [SCRIPT]
    gc.collect()
    linecache.checkcache()
    try:
        exec(compile(Path(SCRIPT).read_text(encoding="utf-8"), SCRIPT, "exec"), module.__dict__)
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:  # noqa: BLE001  whatever the script raises is its result
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1
