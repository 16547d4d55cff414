from contextlib import nullcontext
from pathlib import Path

import pytest
from small import TinyNet

from fedortho import devices
from fedortho.data.images import Images
from fedortho.devices import check_bfloat16
from fedortho.errors import BadSetting
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe


@pytest.mark.parametrize(
    ("level", "flags", "limit", "is_refused"),
    [
        (28, "fpu amx_bf16 amx_tile", "", True),
        (28, "fpu amx_bf16 amx_tile", "AVX512_CORE_AMX", True),
        (28, "fpu amx_bf16 amx_tile", "AVX512_CORE_BF16", False),
        (32, "fpu amx_bf16 amx_tile", "", False),
        (28, "fpu avx512_bf16", "", False),
    ],
)
def test_bfloat16_is_refused_on_a_cpu_whose_amx_would_end_the_process(
    tiny: TinyNet,
    toy: Images,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
    flags: str,
    limit: str,
    is_refused: bool,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\ncpuid level\t: {level}\nflags\t\t: {flags}\n")
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    with pytest.raises(BadSetting, match="ONEDNN_MAX_CPU_ISA") if is_refused else nullcontext():
        fit(tiny, toy, Recipe(epochs=0, precision="bfloat16"))
    check_bfloat16("cuda")
