"""Kernels of ``pytest --nbval``: one whose ports are taken by another program is started again."""

import importlib.util
import socket

import nbval.kernel
import pytest
from helpers.launching import ROOT
from jupyter_client import connect


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(nbval.kernel, "start_new_kernel", nbval.kernel.start_new_kernel)
    spec = importlib.util.spec_from_file_location("of_notebooks", ROOT / "notebooks" / "conftest.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return nbval.kernel.start_new_kernel


def test_a_kernel_whose_port_was_taken_is_started_again(start, monkeypatch):
    taken, chosen = [], connect.write_connection_file

    def write(*args, **kwargs):
        file, ports = chosen(*args, **kwargs)
        taken.append(socket.socket())
        if len(taken) == 1:
            taken[0].bind(("127.0.0.1", ports["shell_port"]))
        return file, ports

    monkeypatch.setattr(connect, "write_connection_file", write)
    manager, client = start(kernel_name="python3")
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    for one in taken:
        one.close()
    assert len(taken) == 2
