# Expected last line: ON_READ   read outside  ValueError    23.0          11.5          11.0
"""How the replicas of a step agree on a variable: by its aggregation, or in a merge_call.

Replica i contributes i + 1, that is [1 | 2], to a variable that starts at 10. Its aggregation says
how contributions become one, and the table shows every case. Where none fits, `merge_call` leaves
the replicas for a moment: a function runs once, sees the values of all, and updates the variable
where it lives. Optimizers are made so; here is the smallest one.
"""

import jax.numpy as jnp

import stratagem as sg

AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
LEARNING_RATE = 0.1


def main():
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    descend(strategy)
    print_row("", "", AGGREGATIONS)
    for method in ["assign", "assign_add", "assign_sub"]:
        row = [assigned(strategy, method, aggregation) for aggregation in AGGREGATIONS]
        print_row("ON_WRITE", method, row)
    parts, aggregates = zip(*(added_on_read(strategy, name) for name in AGGREGATIONS), strict=True)
    print_row("ON_READ", "assign_add", parts)
    print_row("ON_READ", "read outside", aggregates)


def contribution():
    """Returns 1 on replica 0 and 2 on replica 1."""
    return jnp.asarray(sg.get_replica_context().replica_id_in_sync_group + 1, "float32")


def descend(strategy):
    """Takes one step of gradient descent, with the contributions as gradients."""
    with strategy.scope():
        weight = sg.Variable(10.0)  # aggregation NONE: a replica may not assign to it by itself

    def apply(strategy, gradient):  # once for all replicas; `gradient` holds the part of each
        total = strategy.extended.reduce_to("SUM", gradient, weight)
        strategy.extended.update(
            weight, lambda copy, total: copy.assign_sub(LEARNING_RATE * total), args=(total,)
        )
        return total

    def step():
        return sg.get_replica_context().merge_call(apply, args=(contribution(),))

    totals = strategy.run(step)
    print("merge_call gave each replica", numbers(strategy.local_results(totals)))
    print(f"the weight is now {float(weight.value):.1f}\n")


def assigned(strategy, method, aggregation):
    """Returns what an ON_WRITE variable holds after each replica has assigned to it."""
    with strategy.scope():
        variable = sg.Variable(10.0, aggregation=aggregation.lower())

    def step():
        getattr(variable, method)(contribution())

    try:
        strategy.run(step)
    except ValueError:
        return "ValueError"
    return float(variable.value)


def added_on_read(strategy, aggregation):
    """Returns the parts of an ON_READ variable, after each replica has added to its own, and the
    whole, which its aggregation makes of them when it is read outside the replicas.
    """
    with strategy.scope():
        variable = sg.Variable(10.0, synchronization="on_read", aggregation=aggregation.lower())

    def step():
        variable.assign_add(contribution())
        return variable.value

    parts = numbers(strategy.local_results(strategy.run(step)))
    try:
        return parts, float(variable.value)
    except ValueError:
        return parts, "ValueError"


def numbers(values):
    return "[" + " | ".join(f"{float(value):g}" for value in values) + "]"


def print_row(kind, method, cells):
    print(f"{kind:10}{method:14}" + "".join(f"{cell!s:14}" for cell in cells).rstrip())


if __name__ == "__main__":
    main()
