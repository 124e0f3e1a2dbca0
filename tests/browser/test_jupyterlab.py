"""A learner's path in a real browser: open a notebook in JupyterLab, run all cells, read it, use its widget.

    make test-browser

The screenshots are in build/browser/. All other tests run notebooks without a browser, where a widget is never drawn.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))


class Widget(NamedTuple):
    cell: str  # the id of the cell that makes it
    sliders: int
    checkboxes: int = 0
    dropdowns: int = 0


WIDGETS = {
    "01": Widget("stepper", sliders=2),
    "02": Widget("walk-widget", sliders=3, checkboxes=1),
    "03": Widget("stepper", sliders=2, checkboxes=3),
    "06": Widget("explorer", sliders=4, dropdowns=1),
    "07": Widget("explorer", sliders=2, dropdowns=1),
    "08": Widget("explorer", sliders=5, dropdowns=2),
    "09": Widget("kept-widget", sliders=4, checkboxes=1, dropdowns=1),
    "10": Widget("memory-explorer", sliders=3, checkboxes=1),
    "11": Widget("cache-widget", sliders=3, checkboxes=1),
    "12": Widget("planner-widget", sliders=2, dropdowns=2),
}

# In the page: the open notebook, as JupyterLab itself holds it.
CELLS = """() => [...jupyterapp.shell.currentWidget.content.widgets].map(({ model }, place) => ({
    place,
    id: model.id,
    code: model.type === "code",
    tags: model.getMetadata("tags") || [],
    count: model.executionCount || null,
    outputs: model.type === "code" ? model.outputs.toJSON() : [],
}))"""
IDLE = 'jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === "idle"'
OPENED = f"""() => {{
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.content?.widgets?.length > 1 && panel.sessionContext.isReady && {IDLE};
}}"""
# A cell that fails ends the run: those after it keep no count.
RUN = f"""() => {{
    const cells = ({CELLS})().filter(cell => cell.code);
    const failed = c => c.outputs.some(o => o.output_type === "error") && !c.tags.includes("raises-exception");
    return {IDLE} && (cells.some(failed) || cells.every(c => c.count !== null));
}}"""


def open_notebook(page, lab, path: Path) -> list[str]:
    """Opens the copy of a notebook. Returns what the page asks of other machines, a list that grows as it asks."""
    asked: list[str] = []

    def note(request) -> None:
        if not request.url.startswith((lab.address, "data:", "blob:")):
            asked.append(f"{request.resource_type} {request.url}")

    page.on("request", note)
    page.goto(f"{lab.address}/lab/tree/{path.name}?token={lab.token}")
    page.wait_for_function(OPENED, timeout=120_000)
    return asked


def run_all(page, seconds: float = 180) -> list[dict]:
    """Run > Run All Cells, as a learner does it. Returns the notebook's cells when the kernel is done."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()
    end = time.monotonic() + seconds
    while not page.evaluate(RUN) and time.monotonic() < end:
        page.wait_for_timeout(200)
    return page.evaluate(CELLS)


def read(page, cells: list[dict], pictures: Path, stem: str) -> list[str]:
    """Scrolls through the notebook, a screenshot for each screen. Returns the formulas that were not typeset."""
    wrong: set[str] = set()
    page.set_viewport_size({"width": 1440, "height": 1800})
    panel = page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
    panel.evaluate("panel => panel.scrollTo(0, 0)")
    for number in range(1, 100):
        page.wait_for_timeout(700)  # the cells of this screen are drawn
        page.screenshot(path=pictures / f"{stem}-page-{number:02d}.png")
        wrong |= set(
            panel.evaluate("""panel => {
                const texts = [...panel.querySelectorAll(".jp-MarkdownOutput p, .jp-MarkdownOutput li, td")];
                const raw = texts.map(text => text.innerText).filter(text => /\\$[^$]+\\$|\\\\tag/.test(text));
                // MathJax writes an unknown command in red.
                const wrong = [...panel.querySelectorAll("mjx-merror, mjx-mtext[style*='color: red']")];
                return raw.concat(wrong.map(part => part.closest("mjx-container").textContent));
            }""")
        )
        last = panel.locator(f'.jp-Cell[data-windowed-list-index="{len(cells) - 1}"]')
        bottom = panel.bounding_box()["y"] + panel.bounding_box()["height"]
        if last.count() and last.bounding_box() and last.bounding_box()["y"] + last.bounding_box()["height"] <= bottom:
            break
        panel.evaluate("panel => panel.scrollBy(0, panel.clientHeight - 60)")
    page.set_viewport_size({"width": 1440, "height": 900})
    return sorted(wrong)


def outputs_of(page, cells: list[dict], cell_id: str):
    """Scrolls to a cell. Returns its outputs, as a place in the page."""
    (place,) = (cell["place"] for cell in cells if cell["id"] == cell_id)
    page.evaluate("place => jupyterapp.shell.currentWidget.content.scrollToItem(place, 'start')", place)
    outputs = page.locator(f'.jp-Cell[data-windowed-list-index="{place}"] .jp-Cell-outputArea')
    outputs.locator(".jupyter-widgets").first.wait_for()
    return outputs


def shown(outputs) -> str:
    """What a widget shows besides its controls: its HTML and its images."""
    return outputs.evaluate("""area => [...area.querySelectorAll(".widget-html-content, img")]
        .map(part => part.outerHTML).join("\\n")""")


def changes(page, outputs, act) -> bool:
    """Whether what the widget shows changes after act(), within ten seconds."""
    before = shown(outputs)
    act()
    for _ in range(100):
        if shown(outputs) != before:
            return True
        page.wait_for_timeout(100)
    return False


def drag(page, slider, to: float) -> None:
    """Drags the slider's handle with the mouse to this part of its length."""
    handle, track = slider.locator(".noUi-handle").bounding_box(), slider.locator(".noUi-base").bounding_box()
    x, y = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(track["x"] + to * track["width"], y, steps=8)
    page.mouse.up()


def choose_another(box) -> None:
    """Chooses the first option of a list, or the second where the first is chosen already."""
    box.select_option(index=0 if box.evaluate("box => box.selectedIndex") else 1)


def cut_off(page, outputs) -> list[str]:
    """Controls and pictures of a widget that a narrow window cuts off at its right."""
    page.set_viewport_size({"width": 800, "height": 900})
    page.wait_for_timeout(500)
    return outputs.evaluate("""area => {
        const right = area.getBoundingClientRect().right + 4; // the margin of a control
        const kinds = ".widget-hslider, .widget-dropdown, .widget-checkbox, .widget-html, img, svg";
        const parts = [...area.querySelectorAll(kinds)];
        const cut = parts.filter(part => part.getBoundingClientRect().right > right);
        return cut.map(part => part.outerHTML.slice(0, 80));
    }""")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_widget_moves(page, lab, pictures, path):
    committed, stem = path.read_bytes(), path.stem
    for old in pictures.glob(f"{stem}-*.png"):
        old.unlink()
    asked = open_notebook(page, lab, path)
    cells = run_all(page)
    page.screenshot(path=pictures / f"{stem}-ran.png")
    code = [cell for cell in cells if cell["code"]]
    errors = [
        f"{cell['id']}: {output['ename']}: {output['evalue']}"
        for cell in code
        for output in cell["outputs"]
        if output["output_type"] == "error" and "raises-exception" not in cell["tags"]
    ]
    assert errors == []
    assert {cell["id"]: cell["count"] for cell in code} == {c["id"]: i for i, c in enumerate(code, start=1)}
    assert read(page, cells, pictures, stem) == []

    if widget := WIDGETS.get(stem[:2]):
        outputs = outputs_of(page, cells, widget.cell)
        outputs.screenshot(path=pictures / f"{stem}-widget.png")
        sliders, boxes = outputs.locator(".widget-slider").all(), outputs.locator("input[type=checkbox]").all()
        lists = outputs.locator("select").all()
        assert (len(sliders), len(boxes), len(lists)) == widget[1:]
        acts = {f"slider-{i}": lambda slider=slider: drag(page, slider, to=0.3) for i, slider in enumerate(sliders)}
        acts |= {f"checkbox-{i}": box.click for i, box in enumerate(boxes)}
        acts |= {f"list-{i}": lambda one=one: choose_another(one) for i, one in enumerate(lists)}
        for name, act in acts.items():
            assert changes(page, outputs, act), name
            outputs.screenshot(path=pictures / f"{stem}-{name}.png")
            if name.startswith("checkbox"):  # back: a switch may be without effect where another is off
                assert changes(page, outputs, act), name
        assert cut_off(page, outputs) == []
        outputs.screenshot(path=pictures / f"{stem}-narrow.png")

    # Pictures in the text may lie elsewhere, as the Colab badge does. What makes the page work may not.
    assert [line for line in asked if not line.startswith("image ")] == []
    assert path.read_bytes() == committed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_widget_is_used_above(path):
    """Its stored output is the text that stands in for it where no kernel runs."""
    nb = nbformat.read(path, as_version=4)
    ids = [c.id for c in nb.cells if "when the notebook runs live" in str(c.get("outputs", ""))]
    assert ids == [WIDGETS[number].cell for number in WIDGETS if number == path.stem[:2]]
