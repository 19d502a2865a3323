"""Runs one program that a model wrote, in a process of its own that can do little. Started by programs.py.

On standard input: a line with a password, then the program. Before the program begins the process gives up memory,
time, new files and, by a seccomp filter that lets only named system calls pass, the network, other processes and every
way to write. What came of it is told on standard output: the password where the program reached its end, else the
error's name.
"""

import ctypes
import os
import resource
import struct
import sys

# System calls of x86-64 that a single-threaded Python needs to compute, import and read the clock; all else is refused.
ALLOWED = (
    [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 25, 28, 32, 35, 39]  # read ... getpid
    + [60, 63, 72, 79, 89, 96, 97, 98, 99, 100, 102, 104, 107, 108, 131, 158, 186, 202, 204, 217]  # exit ... getdents64
    + [228, 229, 230, 231, 262, 267, 269, 270, 273, 318, 332, 334, 439]  # clock_gettime ... faccessat2
)
OPENING = {2: 24, 257: 32}  # open, openat: where their flags stand in what the filter sees
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
X86_64 = 0xC000003E
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: EPERM
LOAD, EQUAL, ANY_BIT, GIVE = 0x20, 0x15, 0x45, 0x06  # instructions of the filter


def filter_program() -> bytes:
    """The filter, eight bytes an instruction: code, jump if true, jump if false, operand."""
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, X86_64), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for number in ALLOWED:
        steps += [(EQUAL, 0, 1, number), (GIVE, 0, 0, ALLOW)]
    for number, flags in OPENING.items():
        steps += [(EQUAL, 0, 4, number), (LOAD, 0, 0, flags), (ANY_BIT, 1, 0, WRITING)]
        steps += [(GIVE, 0, 0, ALLOW), (GIVE, 0, 0, REFUSE)]
    steps.append((GIVE, 0, 0, REFUSE))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def confine(seconds: int, memory: int) -> None:
    """Give up what the program must not have. Raises OSError where the system does not let us."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.uname().machine != "x86_64":
        raise OSError("the filter of system calls is written for x86-64")
    code = filter_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, by_filter, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp")


def main() -> None:
    seconds, memory = map(int, sys.argv[1:3])
    password, _, program = sys.stdin.buffer.read().decode().partition("\n")
    told = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    sys.argv[:] = ["program"]
    try:
        confine(seconds, memory)
    except (OSError, ValueError) as error:
        os.write(told, f"not confined: {error}".encode())
        os._exit(1)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # of its message nothing is told: it may hold what the program read
        kind = type(error)
        os.write(told, (kind.__name__ if kind.__module__ == "builtins" else "Exception").encode())
        os._exit(1)
    os.write(told, password.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
