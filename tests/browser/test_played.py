"""What a person does in JupyterLab: Run All, the panel, interrupt, restart, shut down, close the browser."""

import signal
from contextlib import suppress

import psutil
from helpers.lab_window import Window, grave, wait_for

RUN_ALL, PLAYED = "run_all.ipynb", "played.ipynb"


def pids(window):
    """The rank processes, as the notebook's second cell prints them."""
    window.run(1)
    return [int(word) for word in window.printed(1, "ranks").split("ranks")[1].split()]


def gone(numbers):
    return wait_for(lambda: not any(map(psutil.pid_exists, numbers)), 45)  # before the pool's own 60


def test_run_all(window):
    def counts():
        return [cell["execution_count"] for cell in window.saved(RUN_ALL) if cell["cell_type"] == "code"]

    window.open(RUN_ALL)
    for _ in range(3):  # JupyterLab may take no notice of the first one, when it has just opened the notebook
        window.command("notebook:run-all-cells", wait=False)
        with suppress(AssertionError):
            wait_for(lambda: any(counts()), 30)
            break
    wait_for(lambda: all(counts()))
    outputs = [output for cell in window.saved(RUN_ALL) for output in cell.get("outputs", ())]
    assert len(outputs) > 5 and not [one for one in outputs if one["output_type"] == "error"]
    assert not window.errors


def test_the_panel(window):
    window.open(PLAYED)
    window.run(0)
    panel = window.cell(0).locator(".jp-Cell-outputArea")
    picture, button = panel.locator("img"), panel.get_by_role("button", name="Run")
    before, words = picture.get_attribute("src"), picture.get_attribute("alt")
    assert "nan_mask" in words
    panel.get_by_role("checkbox", name="no_mask").check()
    panel.get_by_role("checkbox", name="nan_mask").uncheck()
    panel.get_by_role("button", name="3", exact=True).click()
    button.focus()
    window.page.keyboard.press("Enter")
    wait_for(lambda: picture.get_attribute("src") != before)
    wait_for(lambda: button.text_content().strip() == "Run")
    assert "no_mask, 3 ranks" in picture.get_attribute("alt")
    assert "The mask is forgotten." in panel.text_content()  # the diagnosis
    assert button.evaluate("one => one === document.activeElement")
    assert not grave(window.page, ".jp-Cell-outputArea .jupyter-widgets")
    panel.locator("textarea").fill("")
    button.click()
    wait_for(lambda: "Error" in panel.text_content())
    assert picture.count() == 0  # none of another run's stands above an error
    assert not window.errors


def test_interrupt_restart_and_shut_down(window):
    window.open(PLAYED)
    window.run(0)
    ranks = pids(window)
    window.run(2, wait=False)
    window.printed(2, "now it waits")
    window.command("notebook:interrupt-kernel")
    assert len(window.printed(2, "KeyboardInterrupt").splitlines()) < 25
    assert pids(window) == ranks  # the pool goes on
    window.command("notebook:restart-kernel", wait=False)
    window.page.locator(".jp-Dialog .jp-mod-accept").click()
    gone(ranks)
    window.idle()
    panel = window.cell(0).locator(".jp-Cell-outputArea")
    assert "After the kernel was restarted, run this cell again." in panel.text_content()
    window.run(0)
    assert "model not found" not in panel.text_content() and panel.locator("img").count() == 1
    ranks = pids(window)
    window.command("kernelmenu:shutdown", wait=False)
    gone(ranks)
    assert not window.errors


def test_a_closed_browser_leaves_the_work_and_a_stopped_server_leaves_no_rank(chromium, own_server):
    window = Window(chromium, own_server)
    window.open(PLAYED)
    ranks = pids(window)
    window.saved(PLAYED)
    window.context.close()
    back = Window(chromium, own_server)
    back.open(PLAYED)
    assert pids(back) == ranks  # as JupyterLab promises: who comes back finds the kernel, and its ranks
    back.run(2, wait=False)
    back.printed(2, "now it waits")
    back.context.close()
    own_server.process.send_signal(signal.SIGINT)  # Ctrl-C twice, as `launch` says
    own_server.says("Shut down this Jupyter server")
    assert not own_server.end(lambda: own_server.process.send_signal(signal.SIGINT))
    gone(ranks)
