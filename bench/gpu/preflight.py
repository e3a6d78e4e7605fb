"""Lists what this machine has and lacks for engines on GPUs. `twopass serve` asks the same before it launches one."""

from collections.abc import Iterator

from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import Setting
from cluster.preflight import Driver, Needs, missing_for, this_machine


def run(setting: Setting) -> Iterator[Item]:
    """In a rehearsal the driver is not asked, and missing things are notes instead of problems."""
    machine = this_machine(with_gpus=not setting.rehearsal)
    driver = machine.driver
    rows: list[tuple[Cell, ...]] = [
        ("C compiler", str(machine.compiler)),
        ("Python.h", str(machine.has_python_h)),
        ("Triton", str(machine.has_triton)),
        ("CUDA of torch", str(machine.torch_cuda)),
        ("CUDA of the driver", str(driver.version) if isinstance(driver, Driver) else driver),
        ("GPUs", str(len(driver.gpus)) if isinstance(driver, Driver) else "-"),
        ("GPUs that read each other", str(driver.peers) if isinstance(driver, Driver) else "-"),
        ("/dev/shm, free bytes", str(machine.shared_memory_bytes)),
    ]
    yield Table("what engines on GPUs need", (Column("what"), Column("here")), rows)
    for line in missing_for(Needs(num_gpus=1, transport="auto", shared_memory_bytes=0), machine):
        yield Note(line) if setting.rehearsal else Problem(line)
