"""A JupyterLab as ``launch`` starts it, with nobody's settings or trust."""

import json
import os
import pty
import re
import subprocess
import sys

import psutil
from helpers.lab_window import SECONDS, wait_for
from helpers.launching import command_of_launch

FOLDERS = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTERLAB_SETTINGS_DIR",
           "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR", "TPLAB_PROGRESS")


class Server:
    """A JupyterLab over ``folder``, in which ``played.ipynb`` holds ``cells``; ready when made."""

    def __init__(self, folder, cells):
        self.folder, self._words = folder, folder / "words"
        cells = [{"cell_type": "code", "id": f"cell{at}", "metadata": {}, "execution_count": None, "outputs": [],
                  "source": source} for at, source in enumerate(cells)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        (folder / "played.ipynb").write_text(json.dumps(
            {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
        command = [sys.executable, *command_of_launch(folder),
                   "--LabApp.expose_app_in_browser=True"]  # its commands, which menus and buttons call, by their names
        own = {name: str(folder / name.lower()) for name in FOLDERS}
        self._terminal, theirs = pty.openpty()  # only at a terminal it minds Ctrl-C
        with open(self._words, "w") as words:
            self.process = subprocess.Popen(command, stdin=theirs, stdout=words, stderr=words, cwd=folder,
                                            env={**os.environ, **own, "OMP_NUM_THREADS": "1"})
        os.close(theirs)
        told = self.says(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)")
        self.address, self.token = told[1], told[2]

    def says(self, pattern, seconds=SECONDS):
        """The match of ``pattern`` in what the server prints, as soon as it stands there."""
        def found():
            assert self.process.poll() is None, self._words.read_text()
            return re.search(pattern, self._words.read_text())
        return wait_for(found, seconds)

    def end(self, stop):
        """``stop()`` the server; those of its processes, kernels and ranks included, that did not end with it."""
        if self.process.poll() is not None:
            return []
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        stop()
        _, left = psutil.wait_procs(family, 45)  # before the pool's own 60
        os.close(self._terminal)
        for one in left:
            one.kill()
        return left
