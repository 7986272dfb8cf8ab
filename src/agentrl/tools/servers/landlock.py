"""Restricts this process, for good, to some folders: Linux' Landlock (kernel documentation, userspace-api/landlock).

What it does not cover is asking whether a file exists, and its size and times.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE, _MAKE = (1 << 4) | (1 << 5), (1 << 7) | (1 << 8) | (1 << 10) | (1 << 12)  # make: folder, file, FIFO, link
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_FIRST_VERSION = (1 << 13) - 1
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_NET_TCP = 0b11
_SCOPES = 0b11  # abstract sockets and signals of other processes
_VERSION_REFER, _VERSION_NET, _VERSION_IOCTL, _VERSION_SCOPES = 2, 4, 5, 6
TRUNCATE_VERSION = 3
"""The first version that covers cutting a file by its path."""

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The version of Landlock this kernel has; 0 for none."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_GET_VERSION))
    return max(0, version)


def restrict_files(*, readable: Sequence[Path], writable: Sequence[Path]) -> bool:
    """Leave nothing but these files and folders to open; False where the kernel has no Landlock.

    Needs `no_new_privs`. Raises OSError if the kernel refuses.
    """
    version = landlock_version()
    if version == 0:
        return False
    handled = _handled(version)
    ruleset = _create(handled, version=version)
    try:
        for path in readable:
            _allow(ruleset, path, rights=(_EXECUTE | _READ_FILE | _READ_DIR) & handled)
        for path in writable:
            rights = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE | _MAKE | _REFER | _TRUNCATE
            _allow(ruleset, path, rights=rights & handled)
        _checked(_libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return True


def _handled(version: int) -> int:
    rights = _ALL_OF_FIRST_VERSION
    rights |= _REFER if version >= _VERSION_REFER else 0
    rights |= _TRUNCATE if version >= TRUNCATE_VERSION else 0
    return rights | (_IOCTL if version >= _VERSION_IOCTL else 0)


def _create(handled: int, *, version: int) -> int:
    attributes = struct.pack("=Q", handled)
    if version >= _VERSION_NET:
        attributes += struct.pack("=Q", _NET_TCP)
    if version >= _VERSION_SCOPES:
        attributes += struct.pack("=Q", _SCOPES)
    created = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    return _checked(created, "landlock_create_ruleset")


def _allow(ruleset: int, path: Path, *, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        added = _libc.syscall(
            _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint32(0)
        )
        _checked(added, f"landlock_add_rule for {path}")
    finally:
        os.close(descriptor)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
