"""Products are the same for every instruction set that can be compiled and run here."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from saguaro.kernels.native import FLAGS

SOURCE = Path(__file__).parent / "products.c"
COMMON = [flag for flag in FLAGS if flag not in ("-march=native", "-shared", "-fPIC")]
X86 = {  # flags, what the CPU must have, and how many inputs lie side by side
    "baseline": (["-march=x86-64"], "sse2", 2),
    "avx2": (["-march=x86-64-v3"], "avx2", 2),
    "avx-vnni": (["-march=x86-64-v3", "-mavxvnni"], "avx_vnni", 4),
    "avx512-vnni": (["-march=x86-64-v4", "-mavx512vnni"], "avx512_vnni", 4),
}
ARM = {"baseline": (["-march=armv8-a"], 2), "dot product": (["-march=armv8.2-a+dotprod"], 4)}
GCC = shutil.which("gcc") or shutil.which("cc")
ARM_GCC, ARM_CPU = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


def run(folder: Path, compiler: str, flags: list[str], *emulator: str) -> str:
    made = folder / "products"
    command = [compiler, str(SOURCE), "-o", str(made), *COMMON, *flags, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([*emulator, str(made)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.skipif(GCC is None, reason="no C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 CPU")
@pytest.mark.parametrize("name", X86)
def test_on_x86(name: str, tmp_path: Path) -> None:
    flags, needed, together = X86[name]
    if needed not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this CPU has no {needed}")
    assert GCC is not None
    assert run(tmp_path, GCC, flags) == f"{together}\n"


@pytest.mark.skipif(GCC is None, reason="no C compiler")
def test_nothing_is_read_or_written_beyond_its_end(tmp_path: Path) -> None:
    assert GCC is not None
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    nothing = subprocess.run(
        [GCC, "-x", "c", "-", "-o", str(tmp_path / "nothing"), *flags],
        input=b"int main(void) { return 0; }",
        check=False,
    )
    if nothing.returncode != 0:
        pytest.skip("the C compiler has no sanitizers")
    run(tmp_path, GCC, ["-march=native", "-O1", "-g", *flags])


@pytest.mark.skipif(not (ARM_GCC and ARM_CPU), reason="no cross compiler or emulator for ARM")
@pytest.mark.parametrize("name", ARM)
def test_on_arm(name: str, tmp_path: Path) -> None:
    flags, together = ARM[name]
    assert ARM_GCC is not None
    assert ARM_CPU is not None
    assert run(tmp_path, ARM_GCC, [*flags, "-static"], ARM_CPU) == f"{together}\n"
