"""Script that runs one program of a model in a confined process, started by code_eval.py.

Arguments: seconds of computing, bytes of memory, whether the kernel has Landlock, and the program's
length in bytes. Standard input: the program, then a nonce. The nonce stays in the pipe while the
program runs. The line with the outcome, which the parent reads, begins with it.

Before the program starts, the process gives up its capabilities and limits memory, time and new
files. Landlock hides all files except Python's own, including /proc. A seccomp filter allows only
the listed system calls, so the program has no network, cannot start processes, and cannot write.
"""

import ctypes
import os
import resource
import struct
import sys

# System calls of x86-64 that a single-threaded Python needs to compute, import and read the clock:
# read to getpid, exit to getdents64, clock_gettime to faccessat2. All others are refused.
ALLOWED = [
    *map(int, "0 1 3 4 5 6 7 8 9 10 11 12 13 14 15 17 19 20 21 23 25 28 32 35 39".split()),
    *map(int, "60 63 72 79 89 96 97 98 99 100 102 104 107 108 131 158 186 202 204 217".split()),
    *map(int, "228 229 230 231 262 267 269 270 273 318 332 334 439".split()),
]
OPENING = {2: 24, 257: 32}  # open, openat: offset of their flags in the filter's input
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WRITING |= os.O_TMPFILE & ~os.O_DIRECTORY
X86_64 = 0xC000003E
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: EPERM
LOAD, EQUAL, ANY_BIT, GIVE = 0x20, 0x15, 0x45, 0x06  # instructions of the filter
NO_NEW_PRIVILEGES, SET_SECCOMP, BY_FILTER = 38, 22, 2  # arguments of prctl

# Landlock (Linux 5.13, landlock(7)): its system calls have these numbers on every processor.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_FILE, READ_FOLDER, ALL_ACCESS = 1 << 2, 1 << 3, (1 << 13) - 1  # in its first version
# Python's own files, and the files that its extension modules link to and read.
READABLE = [
    *sys.path,
    sys.base_prefix + "/lib",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/nix/store",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
]

libc = ctypes.CDLL(None, use_errno=True)


def filter_program() -> bytes:
    """Return the filter, with eight bytes per instruction.

    They are the code, the jump if true, the jump if false, and the operand.
    """
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, X86_64), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    allow = (GIVE, 0, 0, ALLOW)
    refuse = (GIVE, 0, 0, REFUSE)
    for number in ALLOWED:
        steps += [(EQUAL, 0, 1, number), allow]
    for number, flags in OPENING.items():
        steps += [(EQUAL, 0, 4, number), (LOAD, 0, 0, flags)]
        steps += [(ANY_BIT, 1, 0, WRITING), allow, refuse]
    steps.append(refuse)
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def landlock_version() -> int:
    """Return the kernel's version of Landlock, or 0 if Landlock is missing or off."""
    return max(0, libc.syscall(CREATE_RULESET, None, 0, 1))


def checked(result: int, call: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"no {call}")
    return result


def restrict_files() -> None:
    """Restrict the process by Landlock to reading and listing READABLE."""
    attributes = ctypes.c_uint64(ALL_ACCESS)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(attributes), 8, 0)
    rules = checked(ruleset, "Landlock")
    for path in filter(os.path.exists, READABLE):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = READ_FILE
        if os.path.isdir(path):
            access |= READ_FOLDER
        beneath = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor), 12)
        checked(libc.syscall(ADD_RULE, rules, 1, beneath, 0), "Landlock rule")
        os.close(descriptor)
    checked(libc.syscall(RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


def confine(seconds: int, memory: int, landlock: bool) -> None:
    """Drop every permission that the program must not have.

    Raises:
        OSError: The system does not allow it.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.uname().machine != "x86_64":
        raise OSError("the filter of system calls is written for x86-64")
    third_version, own_process = 0x20080522, 0
    no_capabilities = ctypes.create_string_buffer(24)
    head = ctypes.create_string_buffer(struct.pack("=Ii", third_version, own_process), 8)
    checked(libc.capset(head, no_capabilities), "capset")
    checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "new privileges")
    if landlock:
        restrict_files()
    code = filter_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    checked(libc.prctl(SET_SECCOMP, BY_FILTER, program, 0, 0), "seccomp")


def main() -> None:
    seconds, memory, landlock, length = map(int, sys.argv[1:5])
    requests = os.dup(0)
    answer = os.dup(1)
    leave = os._exit
    program = b""
    while len(program) < length:
        program += os.read(requests, length - len(program)) or leave(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    sys.argv[:] = ["program"]

    # os.read and os.write are bound now, because the program may replace them
    def end(outcome: str, read=os.read, write=os.write) -> None:
        nonce = read(requests, 64)
        write(answer, nonce + f" {outcome}".encode())
        leave(outcome != "passed")

    try:
        confine(seconds, memory, bool(landlock))
    except (OSError, ValueError) as error:
        end(f"unconfined {error}")
    try:
        # no __name__, so that a main block does not run, as with HF's code_eval
        exec(compile(program.decode(), "program", "exec"), {})
    except BaseException as error:  # its message may contain what the program read: drop it
        end(f"raised {type(error).__name__}")
    end("passed")


if __name__ == "__main__":
    main()
