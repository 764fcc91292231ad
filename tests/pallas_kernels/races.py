"""Simulated kernels that are watched for races. What is not public in jax's simulator is used here and nowhere else.

The simulator prints the races that it finds and keeps them in a record, but every kernel begins with a new one: of a call
of several kernels only the last one's is left. `no_race` keeps them all.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu

# Copies share the entries of a clock that cores leave: with the default, one or two, the wait for one copy seems a wait for
# all that began before it.
_CLOCK = 256
# Copies are made when they are waited for. One that nothing waits for is never made: values tell, it is no race.
LATE = pltpu.InterpretParams(
    detect_races=True, vector_clock_size=_CLOCK, uninitialized_memory="nan", dma_execution_mode="on_wait"
)
# Copies are made when they are started. One that nothing waits for is a race, and values are right. Two cores, as v4 and
# v5p have: what a kernel calls parallel is dealt over them, and races if it is not. They compile anew at every call.
EAGER = dataclasses.replace(LATE, dma_execution_mode="eager", num_cores_or_threads=2)


@contextlib.contextmanager
def no_race() -> Iterator[None]:
    """Fails unless kernels are simulated inside, each of them watched for races, and none has one. A decorator, too."""
    records: list[Any] = []
    make = simulator.RaceDetectionState

    def keep(**sizes: int) -> Any:
        records.append(make(**sizes))
        return records[-1]

    pltpu.reset_tpu_interpret_mode_state()  # a kernel that failed leaves its record to the next one
    with mock.patch.object(simulator, "RaceDetectionState", keep):
        yield
        jax.effects_barrier()  # kernels run on after the call that starts them
    assert records, "no kernel was simulated"
    assert all(record.reads or record.writes for record in records), "a kernel was not watched for races"
    racy = [i for i, record in enumerate(records) if record.races_found]
    assert not racy, f"races in kernels {racy} of {len(records)}, printed above"
