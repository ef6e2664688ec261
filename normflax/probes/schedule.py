"""At which steps the layers are read."""


def probed_steps(grid: str, steps: int) -> tuple[int, ...]:
    """Steps with a layer record, among 0 … steps - 1.

    log: 0 and the powers of two, every ⌈steps/50⌉-th step, and the last · all: every step · none: no step.
    """
    if grid == "none":
        return ()
    if grid == "all":
        return tuple(range(steps))
    powers = {0} | {2**k for k in range(steps.bit_length())}
    even = set(range(0, steps, -(-steps // 50)))
    return tuple(sorted(step for step in powers | even | {steps - 1} if step < steps))
