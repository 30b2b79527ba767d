"""A synthetic profile for the tests of the report, and a parser of its page."""

import re
from html.parser import HTMLParser
from xml.etree.ElementTree import Element

from tfkit.tools.profile.result import ComponentTime, KernelTime, Limits, MemoryUse, Profile

SECTIONS = ("summary", "time", "components", "layers", "roofline", "floor", "memory", "kernels", "measured")
VOID = ("meta", "br", "img", "link")


def part(path, component, time, *, forward=1 / 3, flops=None, moved=None, **more):
    layer = re.match(r".*layers\.\d+|.*", path)[0]
    label = {"ffn": "FFN", "norm": "LayerNorm"}.get(component, component)
    floor = None if flops is None else max(flops / 1e12, moved / 1e11)
    sizes = {"allocated": 4000, "at_peak": 1000, "highest": 9000} | more
    times = {"forward": time * forward, "backward": time * (1 - forward), "device": 0.0}
    node = path.partition(".")[0]
    return ComponentTime(
        path, component, label, node, layer, 1, **times, **sizes, flops=flops, bytes=moved, floor=floor
    )


def made_up(name="made_up", **changes):
    """A model of two layers whose times are all different: attention takes 13 ms, FFN 29 ms, the step 70 ms."""
    parts = (
        part("embedding", "embedding", 1e-3, flops=1e6, moved=1e7),
        part("decoder.layers.0.attention", "attention", 5e-3, flops=2e9, moved=1e7),
        part("decoder.layers.0.ffn", "ffn", 11e-3, flops=8e9, moved=2e7),
        part("decoder.layers.0.ffn.norm", "norm", 2e-3, flops=1e7, moved=4e7),
        part("decoder.layers.1.attention", "attention", 8e-3, flops=2e9, moved=1e7),
        part("decoder.layers.1.ffn", "ffn", 18e-3, flops=8e9, moved=2e7),
        part("logits", "head", 9e-3, flops=4e9, moved=3e7),
        part("loss", "loss", 4e-3),
        part("optimizer", "optimizer", 7e-3, forward=1.0),
    )
    kernels = tuple(KernelTime(f"aten::op{n}", "ffn", "FFN", "forward", 2.0, (30 - n) * 1e-4) for n in range(25))
    memory = MemoryUse(50_000, 20_000, 10_000, 8_000, 10_000, 0, "decoder.layers.1.ffn", "backward")
    names = {
        "name": name,
        "device": "cpu",
        "device_name": "a CPU",
        "mode": "train",
        "dtype": "float32",
        "batch": 2,
        "length": 128,
        "compiled": False,
        "parameters": 2500,
        "steps": (69e-3, 71e-3),
        "plain_steps": (50e-3, 50e-3, 50e-3),
        "parts": parts,
        "kernels": kernels,
        "unattributed": 5e-3,
        "idle": 0.0,
        "memory": memory,
        "limits": Limits("a CPU", 1e12, 1e11, "measured"),
        "notes": ("said to the reader",),
    }
    return Profile(**{**names, **changes})


class Page(HTMLParser):
    """The elements of a page, and the text of each with all that is in it."""

    def __init__(self, text):
        super().__init__()
        self.root = Element("page")
        self._open = [self.root]
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {key: value or "" for key, value in attrs})
        self._open[-1].append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop().tag == tag

    def handle_data(self, data):
        self._open[-1].append(text := Element("text"))
        text.text = data

    def section(self, name):
        return next(section for section in self.root.iter("section") if section.get("id") == name)

    def rows(self, section):
        """The rows of the tree of a section as texts, those that open included."""
        return [[words(cell) for cell in row if cell.tag == "span"] for row in having(self.section(section), "row")]

    def table(self, section):
        return [[words(cell) for cell in row if cell.tag != "text"] for row in self.section(section).iter("tr")]


def words(element):
    return "".join(element.itertext())


def having(element, name):
    return [child for child in element.iter() if name in child.get("class", "").split()]
