"""What a person does in JupyterLab: Run All, the panel, the slider, interrupt, restart, shut down."""

import psutil
from helpers.lab_window import wait_for

RUN_ALL, PLAYED = "run_all.ipynb", "played.ipynb"


def pids(window):
    """The rank processes, as the notebook's third cell prints them."""
    window.run(2)
    return [int(word) for word in window.printed(2, "ranks").split("ranks")[1].split()]


def gone(numbers):
    return wait_for(lambda: not any(map(psutil.pid_exists, numbers)), 20)


def test_run_all(window):
    window.open(RUN_ALL)
    window.command("notebook:run-all-cells")
    window.idle()
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
    button.focus()
    window.page.keyboard.press("Enter")
    wait_for(lambda: picture.get_attribute("src") != before)
    wait_for(lambda: button.text_content().strip() == "Run")
    assert "no_mask, 2 ranks" in picture.get_attribute("alt")
    assert "future" in panel.text_content()
    assert button.evaluate("one => one === document.activeElement")
    panel.locator("textarea").fill("")
    button.click()
    wait_for(lambda: "Error" in panel.text_content())
    assert picture.count() == 0  # none of another run's stands above an error
    assert not window.errors


def test_the_slider(window):
    window.open(PLAYED)
    window.run(1)
    place = window.cell(1).locator(".jp-Cell-outputArea")
    handle, picture = place.locator(".noUi-handle"), place.locator("img")
    assert "After step 2" in picture.get_attribute("alt") and "After step 2" in place.text_content()
    handle.press("ArrowLeft")
    wait_for(lambda: "After step 1" in (picture.get_attribute("alt") or ""))
    assert "After step 1" in place.locator(".jupyter-widgets").first.text_content()
    assert not window.errors


def test_interrupt_restart_and_shut_down(window):
    window.open(PLAYED)
    window.run(0)
    ranks = pids(window)
    window.run(3, wait=False)
    window.printed(3, "now it waits")
    window.command("notebook:interrupt-kernel")
    assert len(window.printed(3, "KeyboardInterrupt").splitlines()) < 25
    assert pids(window) == ranks  # the pool goes on
    window.command("notebook:restart-kernel", wait=False)
    window.page.get_by_role("button", name="Restart").click()
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
