"""Print the number of layers of a spec."""

import click

import tfkit


@tfkit.command("depth", examples="tfkit depth everything_small")
@click.argument("spec")
def depth(reader: tfkit.Reader, spec: str) -> None:
    graph = reader.load(spec)
    for node in graph.nodes:
        layers = node.config.stack()
        if layers is not None:
            click.echo(f"{node.name}: {len(layers.layers)}")
