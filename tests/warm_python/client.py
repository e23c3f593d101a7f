"""`python ARGUMENTS` of the warm Python: asks the fork server for a process, and stands for it until it ends.

Started without site-packages, in some hundredths of a second; it imports nothing of this project. Signals that it gets
are passed on; when it is killed, the server kills the process, and when the process dies of a signal, so does this one.
"""

import json
import os
import resource
import signal
import socket
import sys
import time

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGTSTP")
NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")
START_S = 180.0
"""Seconds that the server may take to import and listen."""


def main(socket_path: str, program: str) -> None:
    """Runs a program (python, headrace, ...) with this process's arguments, environment and open files."""
    inherited = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  (pathlib costs a third of the start)
    files = [number for number in inherited if _is_open(number)]
    server = _connect(socket_path)
    limits = {n: resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)}
    request = {
        "program": program,
        "arguments": sys.argv[1:],
        "environ": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109
        "files": files,
        "limits": limits,
        "umask": os.umask(0o022),
    }
    payload = json.dumps(request).encode()
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    socket.send_fds(server, [len(payload).to_bytes(4, "big")], [*namespaces, *files])
    server.sendall(payload)
    for name in PASSED_ON:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda given, _frame: server.send(bytes([given])))
    answers = server.makefile("rb")
    with open("/proc/self/comm", "wb") as own:  # noqa: PTH123
        own.write(b"warm-" + answers.readline().strip())  # see `real_pid`
    status = int(answers.readline() or b"9")  # the server is gone
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the listing's own
        return False
    return True


def _connect(path: str) -> socket.socket:
    deadline = time.monotonic() + START_S
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
        except OSError:
            server.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return server
