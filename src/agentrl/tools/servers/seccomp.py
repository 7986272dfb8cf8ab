"""Takes system calls away from this process, for good: a seccomp filter (Linux on x86-64 only).

Gone are sockets, other processes (starting, signalling, tracing or limiting them, also by way of a file that has an
owner or memory that is shared), modes and owners of files, memory outside the address-space limit, everything that
administers the machine, and every call that is newer than this list. Threads stay.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_CALLS = 0x40000000
_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # in struct seccomp_data; low halves of arguments
_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x00010000

_DENIED = {
    "socket": 41, "io_uring_setup": 425,
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
    "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "process_madvise": 440,
    "setpriority": 141, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279,
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240,
    # Identifiers of shared memory and queues are small numbers: what others made could be guessed.
    "shmat": 30, "shmctl": 31, "semop": 65, "semctl": 66, "semtimedop": 220, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
    "mq_unlink": 241, "inotify_init": 253, "inotify_init1": 294, "fanotify_init": 300, "modify_ldt": 154,
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452,
    "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
    "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "mknod": 133, "mknodat": 259,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "name_to_handle_at": 303, "open_by_handle_at": 304, "quotactl": 179, "acct": 163,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "sethostname": 170, "setdomainname": 171, "syslog": 103,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "iopl": 172, "ioperm": 173,
}  # fmt: skip
# Their first argument is a process: this one's own number or 0 is fine.
_ONLY_ON_ITSELF = {
    "kill": 62, "tkill": 200, "tgkill": 234, "prlimit64": 302,
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "sched_setattr": 314,
}  # fmt: skip
# By the low half of their second argument: who gets the signals of a file, and which signal.
_DENIED_COMMANDS = {"fcntl": (72, (8, 10, 15)), "ioctl": (16, (0x8901, 0x8902))}  # F_SETOWN, F_SETSIG, F_SETOWN_EX, ...
_SET_PARENT_DEATH_SIGNAL, _PRCTL = 1, 157
_LAST_KNOWN = 462
_TRUNCATE = 76
_SIGNALS = frozenset({"kill", "tkill", "tgkill"})  # 0 would be the whole process group


def has_filter() -> bool:
    """Whether `deny_system_calls` has a filter for this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def deny_system_calls(*, may_truncate: bool) -> bool:
    """Install the filter; denied calls fail with EPERM. False where there is none for this machine.

    `may_truncate`: files may be cut by their path, because something else sees to it which ones.

    Needs `no_new_privs`. Raises OSError if the kernel refuses.
    """
    if not has_filter():
        return False
    program = _program(process_id=os.getpid(), may_truncate=may_truncate)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog {unsigned short length; struct sock_filter *filter} with the padding of the ABI
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp filter: {os.strerror(number)}")
    return True


def _program(*, process_id: int, may_truncate: bool) -> bytes:
    """The filter as classic BPF."""
    denied, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    steps = [
        _step(_LOAD, _ARCH), _step(_JUMP_EQUAL, _AUDIT_ARCH_X86_64, yes=1), _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER), _step(_JUMP_GREATER_EQUAL, _X32_CALLS, no=1), _step(_RETURN, _KILL_PROCESS),
        _step(_JUMP_GREATER_EQUAL, _LAST_KNOWN + 1, no=1), _step(_RETURN, missing),
        _step(_JUMP_EQUAL, _CLONE3, no=1), _step(_RETURN, missing),  # then the C library uses clone
        _step(_JUMP_EQUAL, _CLONE, no=4), _step(_LOAD, _FIRST_ARGUMENT), _step(_JUMP_BITS, _CLONE_THREAD, no=1),
        _step(_RETURN, _ALLOW), _step(_RETURN, denied),
    ]  # fmt: skip
    for number in [*_DENIED.values(), *([] if may_truncate else [_TRUNCATE])]:
        steps += [_step(_JUMP_EQUAL, number, no=1), _step(_RETURN, denied)]
    # A script must end with its server: the signal that sees to it cannot be taken back.
    steps += _denied_values(_PRCTL, (_SET_PARENT_DEATH_SIGNAL,), argument=_FIRST_ARGUMENT)
    for number, commands in _DENIED_COMMANDS.values():
        steps += _denied_values(number, commands, argument=_SECOND_ARGUMENT)
    for name, number in _ONLY_ON_ITSELF.items():
        zero = process_id if name in _SIGNALS else 0
        steps += [
            _step(_JUMP_EQUAL, number, no=5), _step(_LOAD, _FIRST_ARGUMENT),
            _step(_JUMP_EQUAL, process_id, yes=1), _step(_JUMP_EQUAL, zero, no=1),
            _step(_RETURN, _ALLOW), _step(_RETURN, denied),
        ]  # fmt: skip
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _denied_values(number: int, values: Sequence[int], *, argument: int) -> list[bytes]:
    """Deny a call where an argument is one of these."""
    denied = _ERRNO | errno.EPERM
    checks = [step for value in values for step in (_step(_JUMP_EQUAL, value, no=1), _step(_RETURN, denied))]
    return [_step(_JUMP_EQUAL, number, no=len(checks) + 2), _step(_LOAD, argument), *checks, _step(_RETURN, _ALLOW)]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
