"""Defaults of the OpenMP runtime: waiting threads sleep, and CPU limits of containers hold."""

import os
import subprocess
import sys

import pytest

from draftwise import openmp
from draftwise.openmp import cpu_limit, set_defaults, usable_cores


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


VERSION_2 = {"proc/self/cgroup": "0::/pods/one\n"}
VERSION_1 = {"proc/self/cgroup": "3:cpuset:/\n4:cpu,cpuacct:/pods/one\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        (VERSION_2, None),
        (VERSION_2 | {"sys/fs/cgroup/pods/one/cpu.max": "max 100000\n"}, None),
        (VERSION_2 | {"sys/fs/cgroup/pods/one/cpu.max": "150000 100000\n"}, 1.5),
        # A group around this group is narrower.
        (
            VERSION_2
            | {
                "sys/fs/cgroup/pods/one/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/pods/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        # In a container, the group is the top of the mounted folder.
        (VERSION_2 | {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (
            VERSION_1
            | {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            VERSION_1
            | {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_reads_the_limit_of_control_groups(tmp_path, files, limit):
    assert cpu_limit(write(tmp_path, files)) == limit


def test_limits_threads_to_whole_cores(monkeypatch):
    monkeypatch.setattr(openmp, "cpu_limit", lambda: 2.5)
    monkeypatch.setattr(openmp, "usable_cores", lambda: list(range(64)))
    environment = {}
    set_defaults(environment)
    assert environment["OMP_NUM_THREADS"] == "2"
    monkeypatch.setattr(openmp, "cpu_limit", lambda: 0.5)
    environment = {}
    set_defaults(environment)
    assert environment["OMP_NUM_THREADS"] == "1"


def test_keeps_what_the_user_has_set(monkeypatch):
    monkeypatch.setattr(openmp, "cpu_limit", lambda: 1.0)
    monkeypatch.setattr(openmp, "usable_cores", lambda: list(range(64)))
    chosen = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active"}
    environment = dict(chosen)
    set_defaults(environment)
    assert environment == chosen


def test_defaults_are_set_before_pytorch_is_imported():
    code = (
        "import draftwise, os, sys; assert 'torch' not in sys.modules; "
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, env=environment
    )
    assert int(done.stdout) > 0


def test_usable_cores_are_those_of_the_process():
    assert 1 <= len(usable_cores()) <= (os.cpu_count() or 1)
