"""Widgets that move a picture, and the text table that takes their place where there is no ipywidgets."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

Control = tuple[str, dict[str, Any]]  # the name of a class of ipywidgets, and its arguments


def slider(description: str, value: int, least: int, most: int) -> Control:
    """A slider over whole numbers."""
    return "IntSlider", {"description": description, "value": value, "min": least, "max": most}


def log_slider(
    description: str, value: float, least: float, most: float, *, base: int = 2, step: float = 1, form: str = ",.0f"
) -> Control:
    """A slider over powers of ``base``; least, most and step are exponents. form: how its number is written."""
    exponents = {"base": base, "min": least, "max": most, "step": step, "readout_format": form}
    return "FloatLogSlider", {"description": description, "value": value, **exponents}


def menu(description: str, options: Sequence[Any], value: Any) -> Control:
    return "Dropdown", {"description": description, "options": list(options), "value": value}


def switch(description: str, value: bool = False) -> Control:
    return "Checkbox", {"description": description, "value": value, "indent": False}


def explore(
    draw: Callable[..., Any],
    static: Callable[[], Any],
    summary: str,
    controls: Mapping[str, Control],
    *,
    most: Mapping[str, Callable[[dict[str, Any]], int]] | None = None,
    idle: Mapping[str, Callable[[dict[str, Any]], bool]] | None = None,
    play: str | None = None,
) -> Any:
    """A picture that follows some controls; without ipywidgets, its static twin.

    draw: called with the controls' values by name; returns a Figure, or a text in HTML.  static: makes the twin.
    summary: names the controls on a page without a running kernel, such as "two sliders".
    most: for a slider whose range depends on the other values, its largest value.
    idle: for a control that has no effect beside some values of the others, whether these are such values. It is
    disabled meanwhile.  play: the control that a player moves, by default the first.

    Returns a widget made of core ipywidgets (7 or 8), or what ``static`` returns; inside ``as_players``, a player.
    """
    if _players:
        return _player(draw, static, controls, play or next(iter(controls)), most or {})
    try:
        import ipywidgets as widgets
    except ImportError:
        return static()
    drawn = draw(**{name: given["value"] for name, (_, given) in controls.items()})
    made = {}
    for name, (kind, given) in controls.items():
        look = {"layout": widgets.Layout(width="auto" if kind == "Checkbox" else "460px", max_width="100%")}
        if kind != "Checkbox":
            look["style"] = {"description_width": "150px"}
        if "Slider" in kind and not isinstance(drawn, str):
            look["continuous_update"] = False  # a figure takes too long to follow the mouse
        made[name] = getattr(widgets, kind)(**given, **look)
    if isinstance(drawn, str):
        picture = widgets.HTML(layout=widgets.Layout(max_width="100%"))
    else:
        picture = widgets.Image(format="png", layout=widgets.Layout(width="810px", max_width="100%"))

    def update(_change: Any = None) -> None:
        values = {name: control.value for name, control in made.items()}
        for name, limit in (most or {}).items():
            made[name].max = limit(values)
        for name, without_effect in (idle or {}).items():
            made[name].disabled = without_effect(values)
        drawn = draw(**{name: control.value for name, control in made.items()})
        picture.value = drawn if isinstance(drawn, str) else png(drawn)

    for control in made.values():
        control.observe(update, names="value")
    update()
    shown = list(made.values())
    switches = [control for control in shown if isinstance(control, widgets.Checkbox)]
    if len(switches) > 1:  # side by side; where the window is narrow, one below the other
        beside = widgets.HBox(switches, layout=widgets.Layout(flex_flow="row wrap"))
        shown = [*(control for control in shown if control not in switches), beside]
    return box([*shown, picture], summary)


_players = False


@contextmanager
def as_players() -> Iterator[None]:
    """Let widgets be players meanwhile, for pages on which no kernel runs."""
    global _players
    _players = True
    try:
        yield
    finally:
        _players = False


def _player(draw: Callable, static: Callable, controls: Mapping[str, Control], moved: str, most: Mapping) -> Player:
    """What a widget shows while one control is moved and all others stay where they begin."""
    start = {name: given["value"] for name, (_, given) in controls.items()}
    kind, given = controls[moved]
    if kind == "FloatLogSlider":
        span = given["max"] - given["min"]
        stride = -(-span // 8) if span > 8 else span / 8  # whole powers, where there are enough of them
        values = [given["base"] ** (given["min"] + i * stride) for i in range(int(span / stride) + 1)]
    elif kind == "IntSlider":
        last = most[moved](start) if moved in most else given["max"]
        values = range(given["min"], last + 1, max(1, -(-(last - given["min"]) // 12)))
    else:
        values = [option[-1] if isinstance(option, tuple) else option for option in given.get("options", (False, True))]
    form = given.get("readout_format", "")
    frames = {f"{given['description']}: {value:{form}}": draw(**{**start, moved: value}) for value in values}
    shown = {name: frame if isinstance(frame, str) else png(frame) for name, frame in frames.items()}
    nearest = min(range(len(values)), key=lambda i: abs(values[i] - start[moved])) if "Slider" in kind else 0
    return Player(shown, str(static()), first=nearest)


def png(figure: Any) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()


def box(children: Sequence[Any], summary: str) -> Any:
    """Widgets one below the other. A page without a running kernel shows the summary in their place."""
    import ipywidgets as widgets

    class Box(widgets.VBox):
        def __repr__(self) -> str:
            return f"({summary}: they show when the notebook runs live)"

    return Box(children)


class Svg:
    """An SVG picture, built shape by shape. Attributes of a shape are keywords, with _ in place of -."""

    def __init__(self, width: float, height: float, label: str):
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" style="max-width:100%;height:auto"'
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">']
        self.rect(0, 0, width, height, fill="white")

    def shape(self, tag: str, content: str = "", **attributes: Any) -> None:
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.parts.append(f"<{tag}{given}>{content}</{tag}>")

    def rect(self, x: float, y: float, width: float, height: float, **attributes: Any) -> None:
        self.shape("rect", x=x, y=y, width=width, height=height, **attributes)

    def text(self, x: float, y: float, words: str, size: int = 13, **attributes: Any) -> None:
        self.shape("text", words, x=x, y=y, font_family="sans-serif", font_size=size, **attributes)

    def __str__(self) -> str:
        return "".join(self.parts) + "</svg>"


class Table:
    """A text table whose repr is itself."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Player:
    """Frames with a slider that needs no kernel: on the site, and wherever a notebook's HTML is shown.

    frames: what each is called -> its HTML, or a picture as the bytes of a PNG file.
    text: what stands in for them where there is no HTML.  first: the number of the frame that is shown first.
    """

    def __init__(self, frames: Mapping[str, str | bytes], text: str, first: int = 0):
        self.frames, self.text, self.first = dict(frames), text, first

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html(lambda picture, i: f"data:image/png;base64,{base64.b64encode(picture).decode()}")

    def html(self, address: Callable[[bytes, int], str]) -> str:
        """One frame is shown; without scripts, as in a notebook that is not trusted yet, it stays.

        address: where a picture is to be found, from its bytes and its number.
        """
        shown = ""
        for i, (name, frame) in enumerate(self.frames.items()):
            if isinstance(frame, bytes):
                frame = f'<img src="{address(frame, i)}" alt="{name}" style="max-width:100%">'
            shown += f'<div data-name="{name}"{" hidden" if i != self.first else ""}>{frame}</div>'
        script = (
            "const box=this.closest('div').parentElement,all=box.querySelectorAll('[data-name]');"
            "all.forEach((f,i)=>f.hidden=i!=this.value);this.nextElementSibling.textContent=all[this.value].dataset.name"
        )
        control = (
            f'<input type="range" min="0" max="{len(self.frames) - 1}" value="{self.first}" aria-label="frame" '
            f'style="width:min(60%,360px)" oninput="{script}"> <span>{list(self.frames)[self.first]}</span>'
        )
        return f'<div class="player" style="max-width:100%;font-family:sans-serif"><div>{control}</div>{shown}</div>'


class Players(list):
    """Players one below the other."""

    def html(self, address: Callable[[bytes, int], str]) -> str:
        return "".join(each.html(address) for each in self)
