"""Signals and exit status of the command line."""

import signal
import subprocess
import sys

import pytest

from draftwise.cli import main

LONG = """
import importlib, signal, time
app = importlib.import_module("draftwise.cli.app")
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it

def work(obj):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("ended", flush=True)

app.app = work
app.main()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_termination_ends_child_processes(number, status):
    with subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "begun\n"
        run.send_signal(number)
        assert run.stdout.read() == "ended\n"
        assert run.wait() == status


def test_signal_handlers_are_restored(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["draftwise", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert signal.getsignal(signal.SIGTERM) is before
