"""Kernels of ``pytest --nbval`` and of batches: one whose ports are taken by another program is started again."""

import importlib.util
import socket

import nbformat
import nbval.kernel
import pytest
from helpers.launching import ROOT
from jupyter_client import connect

from course.lab import batch


@pytest.fixture
def taken(monkeypatch):
    """The sockets of another program, which has taken a port of the first kernel; one for each kernel started."""
    sockets, chosen = [], connect.write_connection_file

    def write(*args, **kwargs):
        file, ports = chosen(*args, **kwargs)
        sockets.append(socket.socket())
        if len(sockets) == 1:
            sockets[0].bind(("127.0.0.1", ports["shell_port"]))
        return file, ports

    monkeypatch.setattr(connect, "write_connection_file", write)
    yield sockets
    for one in sockets:
        one.close()


def test_of_nbval(taken, monkeypatch):
    monkeypatch.setattr(nbval.kernel, "start_new_kernel", nbval.kernel.start_new_kernel)
    spec = importlib.util.spec_from_file_location("of_notebooks", ROOT / "notebooks" / "conftest.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    manager, client = nbval.kernel.start_new_kernel(kernel_name="python3")
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    assert len(taken) == 2


def test_of_a_batch(taken, tmp_path):
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")], metadata={
        "kernelspec": {"name": "python3", "display_name": "Python 3"}}), tmp_path / "small.ipynb")
    (outcome,), _ = batch.run([str(tmp_path / "small.ipynb")], [], str(tmp_path / "results"))
    assert not outcome.failure and len(taken) == 2
