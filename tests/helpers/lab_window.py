"""A window with JupyterLab in it: what a person does there, and what they see."""

import json
import time
import urllib.request

SECONDS = 150  # that anything may take on a busy machine
# Messages of JupyterLab's own, which come with an empty notebook as well.
NOT_OURS = ("favicon", "/api/kernels/", "lsp/status", "WebSocket", "ResizeObserver", "/api/workspaces/",
            "Canceled future", "Disposed")  # of a notebook that was closed while its kernel began, or its cells


def wait_for(condition, seconds=SECONDS):
    """What ``condition()`` returns as soon as it is true."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
    return result


def grave(page, selector=None):
    """``{rule: [impact, how many, the first]}`` axe finds serious or critical, in a part of a page or all."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, selector).response["violations"]
    return {one["id"]: [one["impact"], len(one["nodes"]), one["nodes"][0]["html"][:200]] for one in found
            if one["impact"] in ("serious", "critical")}


class Window:
    """One page of a ``server``'s JupyterLab. ``errors``: its console's, without what JupyterLab says by itself."""

    def __init__(self, browser, server):
        self.address, self.token, self.folder, self.errors = server.address, server.token, server.folder, []
        self.context = browser.new_context(viewport={"width": 1400, "height": 1000})
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.on("console", lambda said: said.type == "error" and self._note(f"{said.text} {said.location}"))
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.goto(f"{self.address}/lab/workspaces/w{id(self)}?token={self.token}")
        self.page.wait_for_function("window.jupyterapp?.restored.then(() => true)")

    def _note(self, error):
        if not any(word in error for word in NOT_OURS):
            self.errors.append(error)

    def command(self, name, arguments=None, wait=True):
        """One of JupyterLab's commands, as a menu or a key calls it; waits for its end, but not for ever."""
        call = f"window.jupyterapp.commands.execute({json.dumps(name)}, {json.dumps(arguments or {})})"
        limit = f"new Promise((_, fail) => setTimeout(fail, {1000 * SECONDS}, Error('{name} does not end')))"
        waits = f"Promise.race([{call}.then(() => null), {limit}])"
        self.page.evaluate(f"() => {waits}" if wait else f"() => {{ {call}; }}")

    def open(self, path, kernel=True):
        """Open a notebook; returns when all its cells are on the page and its ``kernel`` is ready."""
        cells = len(json.loads((self.folder / path).read_text(encoding="utf-8"))["cells"])
        self.command("docmanager:open", {"path": path})
        self.page.wait_for_function(f"document.querySelectorAll('.jp-Notebook .jp-Cell').length == {cells}")
        if kernel:
            self.idle()

    def idle(self):
        """Wait for a kernel that has answered and does nothing; a page that says so early has none yet."""
        self.page.wait_for_function("""async () => {
            const context = window.jupyterapp.shell.currentWidget?.sessionContext;
            const kernel = context?.isReady && context.session?.kernel;
            return kernel && kernel.connectionStatus === 'connected' && await kernel.info && kernel.status === 'idle';
        }""")

    def cell(self, number):
        """The cell's own place on the page."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def run(self, number, wait=True):
        """Run one cell; once more where JupyterLab, which has just opened the notebook, took no notice."""
        prompt = self.cell(number).locator(".jp-InputArea-prompt")
        prompt.click()
        self.command("notebook:run-cell", wait=wait)
        if wait:
            wait_for(lambda: prompt.text_content() != "[ ]:" or self.command("notebook:run-cell"))

    def saved(self, path):
        """The cells of a notebook after it was saved."""
        self.command("docmanager:save")
        return json.loads((self.folder / path).read_text(encoding="utf-8"))["cells"]

    def printed(self, number, word):
        """The whole text of a cell's outputs as soon as ``word`` stands in it."""
        place = self.cell(number).locator(".jp-Cell-outputArea")
        return wait_for(lambda: (text := place.text_content()) and word in text and text)

    def close_all(self):
        """Close what is open, and keep nothing of it: JupyterLab calls a notebook changed soon after it was opened."""
        self.command("application:close-all", wait=False)
        discard = self.page.locator(".jp-Dialog .jp-mod-warn")

        def closed():
            if discard.count():
                discard.first.click()
            return not self.page.locator(".jp-NotebookPanel").count()
        wait_for(closed)

    def close(self):
        """Close the page, and end what kernels it has."""
        self.context.close()
        for session in json.loads(self._ask("/api/sessions", "GET")):
            self._ask(f"/api/sessions/{session['id']}", "DELETE")

    def _ask(self, path, method):
        request = urllib.request.Request(self.address + path, method=method,
                                         headers={"Authorization": f"token {self.token}"})
        return urllib.request.urlopen(request, timeout=SECONDS).read()
