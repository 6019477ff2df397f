"""Draftwise is imported where Python has no modules and functions of POSIX, as on Windows."""

import ast
from pathlib import Path

import pytest

import draftwise

from . import forked

POSIX = {"fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "termios", "tty"}
# Everything is imported twice. The first time loads other packages, which choose their own way by
# the platform.
SCRIPT = """
import importlib, os, pkgutil, signal, sys

ATTRIBUTES = {
    os: '''chown chroot confstr eventfd fchmod fork forkpty getegid geteuid getgid getgroups
        getloadavg getpgid getpgrp getpriority getsid getuid killpg lchown lockf memfd_create mkfifo
        mknod nice pathconf pipe2 posix_fadvise posix_fallocate posix_spawn pread preadv pwrite
        pwritev register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile setgid
        setpgid setpriority setsid setuid statvfs sync sysconf uname wait wait3 wait4 waitid
        WNOHANG''',
    signal: '''alarm pause pthread_kill pthread_sigmask setitimer SIGALRM SIGCHLD SIGCONT SIGHUP
        SIGKILL sigpending SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 sigwait SIGWINCH''',
}


def import_all():
    import draftwise, draftwise.cli, draftwise.serving
    for package in draftwise.cli, draftwise.serving:
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    return draftwise.LLM


import_all()
for name in [each for each in sys.modules if each.split(".")[0] == "draftwise"]:
    del sys.modules[name]
for name in sys.argv[1:]:
    sys.modules[name] = None
for module, attributes in ATTRIBUTES.items():
    for name in attributes.split():
        if hasattr(module, name):
            delattr(module, name)
import_all()
"""


@pytest.mark.slow
def test_the_command_line_and_the_server_are_imported_without_posix():
    done = forked.run(*POSIX, program=SCRIPT)
    assert done.returncode == 0, done.stderr


def test_modules_of_posix_are_imported_where_they_are_used():
    for file in sorted(Path(draftwise.__file__).parent.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert POSIX.isdisjoint(names), f"{file} imports {names} at its top"
