"""The fork server behind the warm Python: `python -m tests.warm_python.server SOCKET`, one process for each request.

It imports what training, evaluation and the command line import, and forks. It computes nothing and has no second
thread. A process is killed when its client is gone; all of them, and the server, when the server's input ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import multiprocessing.util
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.warm_python import imports
from tests.warm_python.client import NAMESPACES

_FLAGS = ("-P", "-u", "-I")
"""Options of python that are served; a command with another one gets a python of its own."""


class Server:
    """Forks processes, and tells their clients how they ended.

    Args:
        path: path of the socket.
        executable: the client that stands for python, which the processes find in `sys.executable`.
    """

    def __init__(self, path: str, executable: str) -> None:
        self._executable = executable
        self._clients: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}  # child -> the process that runs: its own child in another pid namespace
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(64)
        self._selector = selectors.DefaultSelector()
        self._wake, wakes = socket.socketpair()
        wakes.setblocking(False)
        self._wakes = wakes
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serves until standard input ends."""
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._wake:
                    self._wake.recv(4096)
                elif key.fileobj is sys.stdin:
                    self._end()
                else:
                    self._hear(key.data)
            self._collect()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            header, files, _, _ = socket.recv_fds(client, 4, 250)
            size = int.from_bytes(header, "big")
            request = json.loads(client.recv(size, socket.MSG_WAITALL))
        except (OSError, ValueError):  # it was killed meanwhile
            client.close()
            return
        namespaces, files = files[: len(NAMESPACES)], files[len(NAMESPACES) :]
        elsewhere = namespaces if any(map(_is_other, namespaces, NAMESPACES)) else []
        answer, tell = os.pipe() if elsewhere else (-1, -1)
        child = os.fork()
        if not child:
            if elsewhere:
                os.close(answer)
                _enter(elsewhere, tell)
            for file in namespaces:
                os.close(file)
            become(request, files, self._executable, partial(self._forget, client))
        for file in (*namespaces, *files):
            os.close(file)
        process = child
        if elsewhere:
            os.close(tell)
            process = int(os.read(answer, 20) or child)  # nothing where it could not be entered: the child says so
            os.close(answer)
        with contextlib.suppress(OSError):
            client.sendall(b"%d\n" % process)
        self._clients[child], self._processes[child] = client, process
        self._selector.register(client, selectors.EVENT_READ, child)

    def _forget(self, client: socket.socket) -> None:
        """In a child: closes what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (client, self._listening, self._wake, self._wakes, *self._clients.values()):
            each.close()

    def _hear(self, child: int) -> None:
        """A byte is a signal to pass on; the end of the stream is the client's, and its process group's with it."""
        if child not in self._clients:
            return
        try:
            numbers = self._clients[child].recv(64)
        except OSError:
            numbers = b""
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[child], number)
        if not numbers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[child], signal.SIGKILL)
            self._selector.unregister(self._clients.pop(child)).fileobj.close()  # type: ignore[union-attr]

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                client = self._clients.pop(ended[0], None)
                self._processes.pop(ended[0], None)
                if client is not None:
                    self._selector.unregister(client)
                    with contextlib.suppress(OSError):
                        client.sendall(b"%d\n" % ended[1])
                    client.close()

    def _end(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os._exit(0)


def _is_other(file: int, name: str) -> bool:
    return os.fstat(file).st_ino != Path("/proc/self/ns", name).stat().st_ino


def _enter(namespaces: list[int], tell: int) -> None:
    """In a child: enters namespaces, and forks the process that runs there; does not return in the child itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    for file in namespaces:
        if libc.setns(file, 0):
            print(f"setns: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
            os._exit(1)
    process = os.fork()
    if not process:
        os.close(tell)
        return
    os.write(tell, b"%d" % process)
    signal.set_wakeup_fd(-1)
    os.closerange(0, 1024)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def become(request: dict[str, Any], files: list[int], executable: str, forget: Callable[[], None]) -> None:
    """Makes this process the one that a client has asked for; does not return."""
    code = 1
    try:
        _set_up(request, files, executable, forget)
        _run(request["program"], request["arguments"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _set_up(request: dict[str, Any], files: list[int], executable: str, forget: Callable[[], None]) -> None:
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    forget()
    _take_files(dict(zip(request["files"], files, strict=True)))
    for number, limit in request["limits"].items():
        resource.setrlimit(int(number), limit)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # what they replace may be those of a process that was set up here before, whose end must not close the files
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    sys.executable = executable


def _take_files(wanted: dict[int, int]) -> None:
    """Gives received files the numbers that they had in the client."""
    free = max([*wanted, *wanted.values(), 2]) + 1
    parked = {}
    for number, file in wanted.items():
        os.dup2(file, free, inheritable=False)
        os.close(file)
        parked[number] = free
        free += 1
    for number, file in parked.items():
        os.dup2(file, number, inheritable=True)
        os.close(file)


def _run(program: str, arguments: list[str]) -> None:
    if program != "python":
        arguments = [*PROGRAMS[program], *arguments]
    flags: list[str] = []
    while arguments and arguments[0] in _FLAGS:
        flags.append(arguments.pop(0))
    own_option = bool(arguments) and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")
    if not arguments or own_option or arguments[:2] in NOT_SERVED:
        os.execv(REAL, [REAL, *flags, *arguments])
    sys.orig_argv[:] = [sys.executable, *flags, *arguments]
    if "-u" in flags:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    option = arguments.pop(0) if arguments[0] in ("-m", "-c") else ""
    target, *rest = arguments
    sys.argv = ["-c" if option == "-c" else target, *rest]
    safe = "-P" in flags or "-I" in flags or os.environ.get("PYTHONSAFEPATH")
    first = [] if safe else [str(Path.cwd()) if option else str(Path(target).resolve().parent)]
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*first, *paths, *sys.path[1:]]
    if option == "-m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif option == "-c":
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(target, "<string>", "exec"), vars(module))
    else:
        runpy.run_path(target, run_name="__main__")


REAL = sys.executable
PROGRAMS = {
    "headrace": ["-m", "headrace"],
    "torchrun": ["-m", "torch.distributed.run"],
    "deepspeed": ["-c", "from deepspeed.launcher.runner import main; main()"],
}
"""Program -> arguments of python."""
NOT_SERVED = (["-m", "pipeline.plan.fake_gpu.worker"],)
"""Commands that have to begin before torch is imported: they get a python of their own."""


def main() -> None:
    """Imports, then serves."""
    path, executable, imported = sys.argv[1:]
    os.dup2(2, 1)  # output of imports
    getattr(imports, f"import_for_{imported}")()
    Server(path, executable).serve()


if __name__ == "__main__":
    main()
