"""Published training of decoders beside the estimates of `sg.planning.search`.

`python -m benchmarks.large_models.published --output DIR` traces a decoder of two and of three
blocks in JAX; everything is linear in the number of blocks. Nothing is compiled or measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import stratagem.planning as planning
from benchmarks.large_models.cases import Decoder
from benchmarks.large_models.jax_decoder import weight_shapes
from stratagem.planning.candidates import Weight, Workload, estimate
from stratagem.planning.traced_costs import TracedCosts, trace_costs

__all__ = ["PublishedRow", "compare", "draw", "make_table", "picked_loss", "read_rows"]

_FIGURES = Path(__file__).with_name("published.toml")
# A fused kernel computes the scores once more in the backward pass (7 products for 6), and half of
# them under a causal mask.
_ATTENTION_SHARE = 7 / 6 / 2
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A published throughput, and how it was reached.

    Fields as in published.toml.
    """

    group: str
    model: str
    sizes: Decoder
    target: planning.Target
    batch: int
    length: int
    tokens: float
    memory_gib: float = 0.0
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    keeps_all: bool = False
    picks_rows: bool = False
    calibrates: bool = False

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.batch * self.length / self.tokens


def read_rows(path: Path = _FIGURES) -> list[PublishedRow]:
    """Returns all rows."""
    groups = tomllib.loads(path.read_text())["group"]
    return [_row(group, fields) for group in groups for fields in group["rows"]]


def _row(group: dict[str, Any], fields: dict[str, Any]) -> PublishedRow:
    fields = dict(fields)
    sizes = Decoder(*fields.pop("sizes"))
    target = planning.parse_target(fields.pop("target"))
    own = {name: group[name] for name in ("memory_bytes", "memory_bytes_per_s") if name in group}
    kind = dataclasses.replace(target.accelerator, **own)
    if "tflops" in fields:
        weights = sizes.num_parameters - sizes.vocabulary * sizes.width
        scores = 2 * sizes.num_layers * sizes.num_heads * sizes.head_size * fields["length"]
        fields["tokens"] = fields.pop("tflops") * 1e12 / (6 * (weights + scores))
    fields |= {name: tuple(fields.get(name, ())) for name in ("saved", "offloaded")}
    return PublishedRow(
        group=group["name"],
        sizes=sizes,
        picks_rows=group.get("picks_rows", False),
        target=dataclasses.replace(target, accelerator=kind),
        **fields,
    )


def compare(row: PublishedRow) -> dict[str, Any]:
    """Returns published and estimated figures of a row."""
    num_devices = row.target.num_devices
    candidate = planning.PlanCandidate(
        strategy="MirroredStrategy",
        num_replicas=num_devices,
        devices_per_replica=1,
        shard_size=num_devices,
        shard_state="all",
        form=planning.Form(),
    )
    block, ends = weight_shapes(row.sizes)
    shapes = [*ends.values(), *(list(block.values()) * row.sizes.num_layers)]
    weights = [Weight(one, 4 * int(np.prod(one)), 8 * int(np.prod(one))) for one in shapes]
    size = max(row.sizes.num_layer_parameters, row.sizes.vocabulary * row.sizes.width)
    work = Workload(
        weights=weights,
        costs={(planning.Form(), 1): _costs(row)},
        num_examples=row.batch,
        global_batch=row.batch * num_devices,
        block=[Weight((size,), 4 * size)],
        num_blocks=row.sizes.num_layers,
        example_bytes=8 * row.length,
    )
    found = estimate(candidate, work, row.target)
    return {
        "group": row.group,
        "model": row.model,
        "machine": row.target.name,
        "published_step_s": row.step_s,
        "step_s": found.step_s,
        "step_error": found.step_s / row.step_s - 1,
        "tokens": row.tokens,
        "memory_gib": found.memory_bytes / _GIB,
        "published_memory_gib": row.memory_gib,
        "memory_error": found.memory_bytes / _GIB / row.memory_gib - 1 if row.memory_gib else None,
        "limit": max(found.seconds, key=lambda name: found.seconds[name]),
        "fits": found.fits,
        "calibrates": row.calibrates,
    }


def _costs(row: PublishedRow) -> TracedCosts:
    """Returns the costs of all blocks, from those of two and of three."""
    two, three = (_traced(row, number) for number in (2, 3))
    more = row.sizes.num_layers - 2
    fields = {
        name: getattr(two, name) + more * (getattr(three, name) - getattr(two, name))
        for name in ("activation_bytes", "with_gradients_bytes", "summed_bytes", "host_bytes")
    }
    operations = [
        *two.operations,
        *(dataclasses.replace(one, times=more * one.times) for one in three.operations),
        *(dataclasses.replace(one, times=-more * one.times) for one in two.operations),
    ]
    return TracedCosts(operations=tuple(operations), divided_share=0.0, **fields)


def _traced(row: PublishedRow, num_layers: int) -> TracedCosts:
    block, ends = weight_shapes(row.sizes)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    weights: Any = {name: shape(one) for name, one in ends.items()}
    weights["blocks"] = [{k: shape(one) for k, one in block.items()} for _ in range(num_layers)]
    tokens = jax.ShapeDtypeStruct((row.batch, row.length), "int32")

    def step(weights: Any, tokens: Any, labels: Any) -> Any:
        gradients = jax.grad(_loss)(weights, tokens, labels, row)
        return jax.tree.map(lambda weight, gradient: weight - 1e-4 * gradient, weights, gradients)

    jaxpr = jax.make_jaxpr(step)(weights, tokens, tokens)
    count = len(jax.tree.leaves(weights))
    return trace_costs(jaxpr, {i: i for i in range(count)}, attention_share=_ATTENTION_SHARE)


def _loss(weights: Any, tokens: Any, labels: Any, row: PublishedRow) -> Any:
    names = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=row.saved,
        names_which_can_be_offloaded=row.offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    block = functools.partial(_block, row=row)
    block = block if row.keeps_all else jax.checkpoint(block, policy=names)
    x = jnp.take(weights["embedding"].astype("bfloat16"), tokens, axis=0)
    for one in weights["blocks"]:
        x = block(x, one)
    logits = _normalized(x, weights["norm"]) @ weights["logits"].astype("bfloat16")
    if row.picks_rows:
        return picked_loss(jax.checkpoint(lambda one: one.astype("float32"))(logits), labels)
    chosen = jax.nn.log_softmax(logits.astype("float32"))
    return -jnp.mean(jnp.sum(chosen * jax.nn.one_hot(labels, row.sizes.vocabulary), axis=-1))


@jax.custom_vjp
def picked_loss(logits: Any, labels: Any) -> Any:
    """Cross-entropy as PyTorch computes it op by op: every result is an array in memory."""
    return _picked_loss_forward(logits, labels)[0]


def _picked_loss_forward(logits: Any, labels: Any) -> tuple[Any, Any]:
    chosen = jax.checkpoint(jax.nn.log_softmax)(logits)
    loss = -jnp.mean(jnp.take_along_axis(chosen, labels[..., None], axis=-1))
    return loss, (chosen, labels)


def _picked_loss_backward(saved: tuple[Any, Any], gradient: Any) -> tuple[Any, None]:
    chosen, labels = saved

    @jax.checkpoint
    def of_picks(gradient: Any) -> Any:
        picks = jax.nn.one_hot(labels, chosen.shape[-1])
        return -gradient / labels.size * picks

    @jax.checkpoint
    def of_logits(chosen: Any, picked: Any) -> Any:
        return picked - jnp.exp(chosen) * jnp.sum(picked, axis=-1, keepdims=True)

    return of_logits(chosen, of_picks(gradient)), None


picked_loss.defvjp(_picked_loss_forward, _picked_loss_backward)


def _normalized(x: Any, scale: Any) -> Any:
    wide = x.astype("float32")
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale.astype(x.dtype)


def _block(x: Any, weights: Any, *, row: PublishedRow) -> Any:
    x = checkpoint_name(x, "input")
    batch, length, _ = x.shape

    def product(y: Any, name: str) -> Any:
        return checkpoint_name(y @ weights[name].astype("bfloat16"), name)

    normalized = _normalized(x, weights["norm_0"])
    query, key, value = (
        jnp.reshape(product(normalized, name), (batch, length, -1, row.sizes.head_size))
        for name in ("query", "key", "value")
    )
    attended = checkpoint_name(
        jax.nn.dot_product_attention(query, key, value, is_causal=True), "attended"
    )
    x = x + product(jnp.reshape(attended, (batch, length, -1)), "output")
    normalized = _normalized(x, weights["norm_1"])
    gated = jax.nn.silu(product(normalized, "gate")) * product(normalized, "inner")
    return x + product(gated, "outer")


def make_table(found: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table: published, estimated and error of each row."""
    lines = [
        "| published | machine | step | estimated | error | memory | estimated | error | longest |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in found:
        memory = (
            f"{one['published_memory_gib']:.1f} GiB | {one['memory_gib']:.1f} GiB "
            f"| {one['memory_error']:+.0%}"
            if one["published_memory_gib"]
            else f" | {one['memory_gib']:.1f} GiB | "
        )
        lines.append(
            f"| {one['group'].split(',')[0]}, {one['model']}"
            f"{', op by op' if 'op by op' in one['group'] else ''}"
            f"{' (calibration)' if one['calibrates'] else ''} | {one['machine']} "
            f"| {one['published_step_s']:.2f} s | {one['step_s']:.2f} s | {one['step_error']:+.0%} "
            f"| {memory} | {one['limit']} |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """Writes a picture of estimated against published steps."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    most = max(max(one["published_step_s"], one["step_s"]) for one in found) * 1.4
    least = min(min(one["published_step_s"], one["step_s"]) for one in found) / 1.4
    line = np.array([least, most])
    axes.plot(line, line, color="#9ca3af", linewidth=1)
    axes.fill_between(line, line * 0.8, line * 1.2, color="#e5e7eb", label="within 20 %")
    colors = ("#2a78b8", "#d9702b", "#2f9e6e", "#8a5bb8", "#c2410c")
    groups = list(dict.fromkeys(one["group"] for one in found))
    for group, color in zip(groups, colors, strict=False):
        for is_calibration in (False, True):
            own = [
                one
                for one in found
                if one["group"] == group and one["calibrates"] == is_calibration
            ]
            axes.scatter(
                [one["published_step_s"] for one in own],
                [one["step_s"] for one in own],
                s=40,
                color=color,
                facecolors="white" if is_calibration else color,
                label=None if is_calibration else group.split(" of 500")[0],
                zorder=3,
            )
    axes.set(xscale="log", yscale="log", xlim=(least, most), ylim=(least, most))
    axes.set_xlabel("published step, s")
    axes.set_ylabel("estimated step, s")
    axes.set_title("7 to 70 billion parameters; open: share of the peak read here", fontsize=11)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
def main(output: Path) -> None:
    """Prints the table, and writes it with figures and picture."""
    output.mkdir(parents=True, exist_ok=True)
    found = [compare(row) for row in read_rows()]
    table = make_table(found)
    (output / "published.md").write_text(table)
    (output / "published.json").write_text(json.dumps(found, indent=1))
    draw(output / "plan_published.png", found)
    print(table)


if __name__ == "__main__":
    main()
