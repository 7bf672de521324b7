"""Emulation of cuTile kernels: `launch` runs an unmodified `@ct.kernel` block by block on CPU tensors.

    with emulation() as run:
        launch(kernel, (blocks,), (x, y, 64))
    assert not run.unwritten(y).any()

It stands on cuda-tile's dispatch mode: every device function asks it what to do when it is called on the host, and
here the answers are torch operations on small tiles. It checks what a GPU would not say: races between blocks, tiles
outside their arrays, undetermined padding, integer overflow. It does not model the python subset (device code runs as
python: the variable of a `for` is a constant here and an int32 on a GPU, builtin min() and max() work on scalars only,
`ct.float32(x)` does not), the order of sums, or approximate instructions: compiling is the other gate.
"""

from ssdgen.run.emulate.errors import EmulationError
from ssdgen.run.emulate.launch import emulation, launch
from ssdgen.run.emulate.memory import Recorder

__all__ = ["EmulationError", "Recorder", "emulation", "launch"]
