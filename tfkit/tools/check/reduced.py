"""The reduced model of a spec: few and narrow layers, in which every property of the spec can still be measured.

It keeps the graph, every layer variant, two givers of a wire that has several, the ratio of query heads to key-value
heads, ties, and positions. Windows stay shorter than the sequences of a check. Equal widths stay equal. Values that are
not sizes do not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, TypeAlias, get_args

from annotated_types import Le
from pydantic.fields import FieldInfo

from tfkit.component import (
    AttentionConfig,
    AttentionPositionConfig,
    Config,
    ContentScoreConfig,
    FFNConfig,
    Layers,
    MaskConfig,
    MaskRuleConfig,
    MixerConfig,
    PositionConfig,
    RopeScalingConfig,
    RotaryConfig,
    ScoreBiasConfig,
    Signal,
    TemperatureConfig,
    parts,
)
from tfkit.errors import Invalid, SpecError
from tfkit.graph.expand import Graph, Node, as_list, expand, wire_sources
from tfkit.plugin.manager import Plugins
from tfkit.spec.load import take_spec
from tfkit.spec.model_spec import InputConfig, ModelSpec
from tfkit.spec.render import spec_data

HEAD = 8
"""Width of a head."""
MIN_WIDTH = 32
"""Minimum width of the residual stream."""
HEADS, FEWEST = 4, 2
"""Number of query heads in `mha` and `mqa`; number of key-value heads in `gqa`."""
ODD_HEADS = 6
"""Number of query heads if the spec's is not a power of two, in which case ALiBi has different slopes."""
BUCKETS, DISTANCE = 8, 10
"""Number of distance buckets, and the distance of the last bucket, which the sequences of a check reach."""
PATCHES = ((3, 2), (4, 4), (8, 8))
"""Rows and columns of an image in patches; the later ones if a block merges the patches of a square image."""
VOCABULARY = 97
MAX_LEN, ROTARY_MAX_LEN = 24, 300
"""Maximum length of a model, and of a model without tables of positions, if its positions are rotary, where bfloat16
rounds the last positions, or if it carries a state, where a sequence has several chunks of the full size."""
FIXED = 12
"""Length of the shortest sequence of fixed length, if the spec's length is larger."""
ORIGINAL_MAX_LEN = 16
"""Training length of rotary scalings, more than most sequences of a check have."""
TEMPERATURE = 4
"""Number of tokens with an equal query temperature."""
DISTANCES = {"n_buckets": 6, "max_distance": 9}
"""Number of rows for distances, all of which occur in the sequences of a check."""
RULE = 5
"""Size of a chunk or block in a mask rule. It does not divide a window."""
EXPERTS = 16
CAPACITY = 2
"""Number of tokens that an expert admits, of which the sequences of a check have more."""
WINDOW = 4
DIM, COUNT, EXTENT = 2**26, 4096, 2**31
"""The bounds of a `Dim`, of a `Count` and of an `Extent`."""
PATTERN = 4
"""Number of layers of the longest layer pattern that is kept unchanged."""


@dataclass(frozen=True)
class ReducedModel:
    """A reduced model of a spec, and a summary of its sizes."""

    graph: Graph
    words: str


def reduced_model(graph: Graph, plugins: Plugins, *, tokens: int = 0, length: int = 0) -> ReducedModel:
    """Build the reduced model of a spec; raise SpecError if the small values contradict each other.

    Vocabularies have at least `tokens` ids, and the model accepts `length` positions if the spec does.
    """
    for patches in PATCHES:
        model = _Shrink(graph, tokens, length, patches).model().model_copy(update={"parameters": None})
        try:
            small = expand(replace(take_spec(spec_data(model), plugins), file=graph.spec.file))
        except SpecError:
            if patches == PATCHES[-1] or not _has_images(graph):
                raise
            continue
        # Several vectors of an image show what their order and their masks do.
        if all(node.output.image_length != 1 for node in small.nodes):
            break
    return ReducedModel(small, ", ".join(_size_summary(graph, small)))


def _has_images(graph: Graph) -> bool:
    return any(config.type in ("image", "images") for config in graph.spec.model.inputs.values())


def _size_summary(graph: Graph, small: Graph) -> Iterable[str]:
    for node in graph.nodes:
        if node.stack is not None:
            layers = small.node(node.name).stack
            yield f"{layers.depth if layers else 0} of {node.stack.depth} layers in `{node.name}`"
    stacks = [node.config for node in small.nodes if node.stack is not None]
    widths = sorted({value for stack in stacks for name, value in stack if name == "d_model"})
    if widths:
        yield f"d_model {'/'.join(map(str, widths))}"
    heads = {(attention.n_heads, attention.kv_heads) for attention in _attention_configs(small.spec.model)}
    if heads:
        yield f"heads {', '.join(f'{h}/{g}' for h, g in sorted(heads))}"


_Around: TypeAlias = AttentionConfig | None
"""The attention that contains a config."""


class _Shrink:
    """Computes the small value of each number of a model.

    Attributes:
        lengths: the fixed lengths of the sequences of the node that is being reduced.
        keeps: true if any size of that node may determine such a length, so all its sizes stay; false if its output is
            as long as an input.
    """

    def __init__(self, graph: Graph, tokens: int, length: int, patches: tuple[int, int]) -> None:
        self.graph, self.tokens, self.patches = graph, tokens, patches
        self.spec = graph.spec.model
        attentions = _attention_configs(self.spec)
        biased = any(isinstance(item.position, ScoreBiasConfig) for item in attentions)
        self.heads = {
            (item.n_heads, item.kv_heads): _small_heads(item.n_heads, item.kv_heads, biased) for item in attentions
        }
        positions = [position for _, position in parts((), self.spec) if isinstance(position, PositionConfig)]
        carries = any(node.stack is not None and node.stack.keeps_state for node in graph.nodes)
        unlimited = (positions or carries) and all(isinstance(position, RotaryConfig) for position in positions)
        self.max_len = max(ROTARY_MAX_LEN if unlimited else MAX_LEN, length)
        self.widths = self._widths(attentions)
        self.rows = self._rows()
        self.placeholders = {token for node in graph.nodes for token in node.config.placeholders().values()}
        self.extents = _small_extents(self.spec)
        self.rule = max([RULE, *(extent + 2 for extent in self.extents.values())])  # extents keep their effect
        self.lengths: set[int] = set()
        self.shortening = self._shortening()
        self.keeps = False
        self.hidden: dict[int, int] = {}
        for node in graph.nodes:
            if node.stack is not None and "layer_features" in node.wires:  # the features have a part for each layer
                width = node.signals["layer_features"].width
                self.widths[width] = _n_layers(node.stack) * self._hidden(width // node.stack.depth)

    def model(self) -> ModelSpec:
        """Return the small model, without checks."""
        graph = {node.name: self._node(node) for node in self.graph.nodes}
        changed = {name: graph[name] for name in self.spec.graph}
        inputs = {name: self._input(name, config) for name, config in self.spec.inputs.items()}
        return self.spec.model_copy(update={"graph": changed, "inputs": inputs})

    def _widths(self, attentions: Iterable[AttentionConfig]) -> dict[int, int]:
        """Return the small width for each width of a residual stream. The first is wide enough for all heads."""
        first, *remaining = _stream_widths(self.spec) or [MIN_WIDTH]
        heads = {item.n_heads: self.heads[item.n_heads, item.kv_heads][0] for item in attentions}
        bound = [heads[item.n_heads] * HEAD for item in attentions if item.d_head is None]
        divided = [number for n_heads, number in heads.items() if first % n_heads == 0]  # transformers may require it
        step = lcm(HEAD, *bound, *divided)
        small_widths = {first: step * -(-MIN_WIDTH // step)}
        for width in remaining:
            small = max(step, round(width * small_widths[first] / first / step) * step)
            while small in small_widths.values():
                small += step
            small_widths[width] = small
        return small_widths

    def _rows(self) -> dict[int, int]:
        """Return the small value of each size of a vocabulary, and of each limit of positions."""
        sizes = [table.rows for node in self.graph.nodes if (table := node.config.table()) is not None]
        sizes += [node.output.width for node in self.graph.nodes if node.config.head() is not None]
        sizes_of_rows = {size for size in sizes if size is not None}
        vocabulary = max(VOCABULARY, self.tokens)
        large = sorted(size for size in sizes_of_rows if size > vocabulary)
        unchanged = {size: size for size in sizes_of_rows if self.tokens and size <= vocabulary}
        return unchanged | {size: vocabulary + 2 * index for index, size in enumerate(large)}

    def _shortening(self) -> int:
        """Return the divisor of fixed lengths, such as 3,000 frames. Derived sequences stay long enough."""
        inputs = self.spec.inputs.values()
        fixed = any(config.type == "features" and config.length is not None for config in inputs)
        if not fixed or any(config.type in ("image", "images") for config in inputs) or self._has_fixed_positions():
            return 1
        signals = (signal for node in self.graph.nodes for signal in _node_signals(node))
        return max(1, min((signal.length for signal in signals if signal.length is not None), default=1) // FIXED)

    def _shorter(self, length: int) -> int:
        """Return the small value of a fixed length."""
        return -(-length // self.shortening)

    def _has_fixed_positions(self) -> bool:
        return any(_is_fixed(attention.position) for attention in _attention_configs(self.spec))

    def _input(self, name: str, config: InputConfig) -> Any:
        """Shrink an input. An image becomes a few times the largest size of the nodes that take it, such as a patch."""
        if config.type not in ("image", "images") or config.height is None or config.width is None:
            return self._config(config)
        if self._has_fixed_positions():
            return config
        readers = [node.config for node in self.graph.nodes if name in wire_sources(node.wires)]
        fields = [field for reader in readers for field in reader if not field[0].startswith("d_")]
        size = max((value for _, value in fields if type(value) is int), default=HEAD)
        rows, columns = self.patches
        sides = {"height": min(config.height, rows * size), "width": min(config.width, columns * size)}
        return config.model_copy(update=sides)

    def _node(self, node: Node) -> Any:
        self.lengths = {signal.length for signal in _node_signals(node) if signal.length is not None}
        lengths = {signal.length for value in node.signals.values() for signal in as_list(value) if signal is not None}
        of_input = node.output.length is not None and node.output.length in lengths
        self.keeps = bool(self.lengths) and node.stack is None and not of_input
        config = self._config(node.config)
        if node.stack is None:
            return config
        n_layers = _n_layers(node.stack)
        if _is_selection(node.stack):
            layers = {**dict(config)}["layers"]
            pattern = tuple(node.stack.layers[number].name for number in _kept_layers(node.stack))
            config = config.model_copy(update={"layers": layers.model_copy(update={"pattern": pattern})})
        return config.model_copy(update={"n_layers": n_layers})

    def _config(self, config: Config, attention: _Around = None) -> Any:
        """Shrink a config and the configs inside it."""
        if _is_fixed(config):
            return config
        attention = config if isinstance(config, AttentionConfig) else attention
        fields = type(config).model_fields.items()
        small = config.model_copy(
            update={n: self._value(config, n, getattr(config, n), _upper_bound(info), attention) for n, info in fields}
        )
        return _with_divisors(small) if isinstance(small, MixerConfig) else small

    def _value(self, config: Config, name: str, value: Any, limit: int | None, attention: _Around) -> Any:
        """Return the small value of a field or of one of its entries."""
        if isinstance(value, Config):
            return self._config(value, attention)
        if isinstance(value, Mapping):
            return {key: self._value(config, name, entry, DIM, attention) for key, entry in value.items()}
        if isinstance(value, tuple):
            return self._tuple(config, value, attention)
        return self._number(config, name, value, limit, attention) if type(value) is int else value

    def _tuple(self, config: Config, value: tuple[Any, ...], attention: _Around) -> tuple[Any, ...]:
        """Shrink a tuple: per-channel factors by their number, and configs individually."""
        if isinstance(config, RopeScalingConfig) and attention is not None and len(value) > 1:
            size = max(1, self._of_head(2 * len(value), attention) // 2)
            return tuple(value[len(value) * index // size] for index in range(size))
        if isinstance(config, RotaryConfig) and attention is not None and value:  # pairs of each axis
            heads, width = self.heads[attention.n_heads, attention.kv_heads][0], self.widths.get(attention.d_model)
            head = HEAD if attention.d_head is not None or width is None else width // heads
            pairs, total = self._of_head(2 * sum(value), attention) * head // HEAD // 2, sum(value)
            ends = [round(pairs * sum(value[: axis + 1]) / total) for axis in range(len(value))]
            return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        return tuple(self._config(item, attention) if isinstance(item, Config) else item for item in value)

    def _number(  # noqa: C901  one case per meaning of a number, in order
        self, config: Config, name: str, value: int, limit: int | None, attention: _Around
    ) -> int:
        """Return the small value of an integer."""
        if name in ("n_heads", "n_kv_heads") and isinstance(config, AttentionConfig):
            return self.heads[config.n_heads, config.kv_heads][name == "n_kv_heads"]
        if isinstance(config, MaskConfig):
            return self.extents.get(value, value)
        if isinstance(config, MaskRuleConfig):
            return value if _is_fixed(attention and attention.position) else min(value, self.rule)
        if isinstance(config, TemperatureConfig):
            return min(value, TEMPERATURE)
        if isinstance(config, RopeScalingConfig) and name.endswith("max_len"):
            return ORIGINAL_MAX_LEN
        if name == "capacity":
            return min(value, CAPACITY)
        if name == "max_len":
            if value in self.lengths:
                return self._shorter(value)
            return min(value, max(self.max_len, *map(self._shorter, self.lengths), 0))
        if limit == EXTENT and attention is not None and attention.chooses_keys:
            return min(value, WINDOW - 1)
        if isinstance(config, ContentScoreConfig):
            return min(value, DISTANCES.get(name, value))
        if isinstance(config, ScoreBiasConfig):
            return min(value, DISTANCE if limit == DIM else BUCKETS)
        if isinstance(config, InputConfig) and (name == "length" or config.type == "positions"):
            return self._shorter(value) if name == "length" else value
        if value in self.rows and name not in ("d_ff", "d_model"):
            return self.rows[value]
        if value + 1 in self.rows and limit not in (DIM, COUNT):  # the last id, for instance of an end token
            return self.rows[value + 1] - 1
        if value in self.placeholders and limit == EXTENT:
            return min(value, *(rows - 1 for rows in self.rows.values()))
        if value in self.widths and (attention is None or name == "d_model"):
            return self.widths[value]
        if limit == COUNT and isinstance(config, FFNConfig):
            return min(value, EXPERTS)
        of_length = self.keeps or (value in self.lengths and not name.startswith("d_"))
        if limit == DIM and not of_length:
            return self._of_head(value, attention) if attention is not None else self._hidden(value)
        return value

    def _of_head(self, value: int, attention: AttentionConfig) -> int:
        """Shrink a width in proportion to a head, or to the residual stream if it is wider than a head.

        A width below the width of a head stays below it.
        """
        if value > attention.head_width:
            return self._hidden(value)
        largest = HEAD if value == attention.head_width else HEAD - 2
        return max(4, min(round(value * HEAD / attention.head_width / 2) * 2, largest))

    def _hidden(self, value: int) -> int:
        """Shrink a width in proportion to the residual stream. Equal widths stay equal, and different widths different.

        A multiple of a different width stays the same multiple: shared experts have the width of several experts.
        """
        if value not in self.hidden:
            large, small = next(iter(self.widths.items()))
            width = value if value <= HEAD else max(HEAD, round(value * small / large / 4) * 4)
            multiples = (w * (value // v) for v, w in self.hidden.items() if value > v and value % v == 0)
            width = next((multiple for multiple in multiples if multiple <= 4 * small), width)
            while width in self.hidden.values():
                width += 4
            self.hidden[value] = width
        return self.hidden[value]


def _is_fixed(config: Config | None) -> bool:
    """Return True for positions that fix the length, and therefore the size of an image."""
    return isinstance(config, AttentionPositionConfig) and config.only_length is not None


def _is_selection(stack: Layers) -> bool:
    """Return True if the reduced model has chosen layers: the pattern is too long, or a wire has several givers."""
    if stack.repeated and stack.period is None:  # a list of all layers
        return False
    long = stack.pattern is not None and (stack.period is None or max(stack.period, stack.minimum) > PATTERN)
    return long or bool(_layers_of_several_givers(stack))


def _kept_layers(stack: Layers) -> list[int]:
    """Return the first layer of each variant, and the layers of a wire with several givers."""
    return sorted({*(numbers[0] for numbers in stack.variants.values()), *_layers_of_several_givers(stack)})


def _layers_of_several_givers(stack: Layers) -> tuple[int, ...]:
    """Return an early giver of a wire, its last giver, and a taker; empty if no sublayer has two givers before it."""
    for connection in () if stack.repeated else stack.connections:
        for number in range(connection.giving_layer or 0):
            if any(connection.wire in step.gives for step in stack.layers[number].steps):
                return number, connection.giving_layer or 0, connection.layer
    return ()


def _n_layers(stack: Layers) -> int:
    """Return the small number of layers."""
    if _is_selection(stack):
        return max(2, len(_kept_layers(stack)))
    if stack.repeated:
        return stack.depth if stack.period is None else min(2 * len(stack.layers), stack.depth)
    return min(max(2, stack.minimum), stack.depth)


def _with_divisors(mixer: MixerConfig) -> MixerConfig:
    """Lower a count that a mixer rejects, such as a number of blocks, until it divides the small width."""
    while True:
        try:
            mixer.check()
        except Invalid as error:
            count = dict(mixer).get(error.field)
            if type(count) is int and count > 1:
                mixer = mixer.model_copy(update={error.field: count - 1})
                continue
        return mixer


def _attention_configs(spec: ModelSpec) -> list[AttentionConfig]:
    return [part for _, part in parts((), spec) if isinstance(part, AttentionConfig)]


def _small_heads(n_heads: int, n_kv_heads: int, biased: bool) -> tuple[int, int]:
    """Return the fewest heads with the same ratio. With a score bias, being a power of two is also preserved."""
    limit = ODD_HEADS if biased and n_heads.bit_count() > 1 else HEADS
    if n_heads == n_kv_heads:
        return min(n_heads, limit), min(n_heads, limit)
    if n_kv_heads == 1:
        return min(n_heads, limit), 1
    return FEWEST * (n_heads // n_kv_heads), FEWEST


def _node_signals(node: Node) -> list[Signal]:
    """Return the signals that a node takes and returns."""
    inputs = [signal for value in node.signals.values() for signal in (value if isinstance(value, list) else [value])]
    return [signal for signal in (*inputs, node.output) if signal is not None]


def _stream_widths(spec: ModelSpec) -> list[int]:
    """Return the widths of residual streams, the most frequent width first."""
    widths = [dict(part).get("d_model") for _, part in parts((), spec) if isinstance(part, Config)]
    return [width for width, _ in Counter(width for width in widths if isinstance(width, int)).most_common()]


def _small_extents(spec: ModelSpec) -> dict[int, int]:
    """Return the small value of each extent of a mask. Different extents stay different."""
    sides = {side for _, mask in parts((), spec) if isinstance(mask, MaskConfig) for side in (mask.left, mask.right)}
    large = sorted(side for side in sides if side is not None and side > WINDOW)
    return {side: WINDOW + index for index, side in enumerate(large)}


def _upper_bound(info: FieldInfo) -> Any:
    """Return the upper bound of a field, which distinguishes `Dim` from `Count`; None without a bound."""
    pending: list[Any] = [info.annotation, *info.metadata]
    while pending:
        part = pending.pop()
        if isinstance(part, Le):
            return part.le
        pending += get_args(part)
        pending += part.metadata if isinstance(part, FieldInfo) else ()
    return None
