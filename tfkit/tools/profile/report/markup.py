"""Elements of the report's page. Their contents are text: markup in a name of a spec stays text."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, tostring

Child = Element | str | None


def tag(name: str, *children: Child, **attributes: object) -> Element:
    """An element with its attributes and children in order; children that are None are left out.

    Args:
        name: the element, such as `div`.
        *children: elements, and texts, which are escaped when the page is written.
        **attributes: `class_` is written `class`, and `stroke_width` `stroke-width`; numbers have two decimals.
    """
    element = Element(name, {key.strip("_").replace("_", "-"): _value(value) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, str):
            _append_text(element, child)
        elif child is not None:
            element.append(child)
    return element


def page(title: str, style: str, *body: Child) -> str:
    """A whole HTML document, which may neither run a script nor load anything beyond itself."""
    root = Element("html", {"lang": "en"})
    head = SubElement(root, "head")
    head.append(tag("meta", charset="utf-8"))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head.append(tag("meta", http_equiv="Content-Security-Policy", content=policy))
    head.append(tag("meta", name_="viewport", content="width=device-width, initial-scale=1"))
    head.append(tag("title", title))
    head.append(tag("style", style))
    root.append(tag("body", *body))
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _append_text(element: Element, text: str) -> None:
    """Text after the last child, or at the beginning if there is none yet."""
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
